"""The engines that can serve a head, by the name that a recipe and a command line give them."""

ENGINES = ("vllm", "sglang", "tensorrt_llm", "eagle", "speculators", "medusa")
AUTHORS = ("eagle", "medusa")  # the authors' own code, which reads only files exported in its own format

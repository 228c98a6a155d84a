"""Serve a target and its draft head over HTTP, as OpenAI's API does, with a chat page that shows the drafts.

    headstart serve recipes/tiny.yaml
    headstart serve --target assets/demo_target --head assets/demo_head
    headstart serve --target models/SmolLM2-135M-Instruct --port 8080 --api-key secret

Any OpenAI client talks to it; base_url is http://127.0.0.1:8000/v1, and the chat page is http://127.0.0.1:8000/.
Requests decode together, and each gets the text that it would get alone and without drafts. /metrics is for Prometheus.
What is refused is refused with a status and the name of the field; docs/serving.md lists all fields and limits.
"""

from headstart.inference.serve.options import serve_options

if __name__ == "__main__":
    serve_options(__doc__)  # --help and mistakes end the process here, before torch is loaded

from headstart.inference.serve.command import main

if __name__ == "__main__":
    main()

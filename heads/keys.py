"""The types of the keys in a head's config.json, ours or published; the rules check the values themselves."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

Size = Annotated[int, Field(gt=0)]
Number = Annotated[float, Field(gt=0)]
Layers = list[Annotated[int, Field(ge=0)]]


class Keys(BaseModel):
    """A section of config.json; keys that are not named here may hold anything."""

    model_config = ConfigDict(extra="allow", strict=True)


class RopeKeys(Keys):
    rope_type: str = "default"
    type: str = "default"
    rope_theta: Number = 1e4
    factor: Number | None = None
    low_freq_factor: Number | None = None
    high_freq_factor: Number | None = None
    original_max_position_embeddings: Size | None = None


class LayerKeys(Keys):
    """The layer's keys: at the top level in most layouts, under `transformer_layer_config` in speculators'."""

    model_type: str | None = None
    hidden_act: str | None = None
    hidden_size: Size | None = None
    intermediate_size: Size | None = None
    num_hidden_layers: Size | None = None
    num_attention_heads: Size | None = None
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    vocab_size: Size | None = None
    max_position_embeddings: Size | None = None
    rms_norm_eps: Number = 1e-6
    rope_theta: Number = 1e4
    rope_parameters: RopeKeys | None = None
    rope_scaling: RopeKeys | None = None
    layer_types: list[str] | None = None
    num_aux_hidden_states: Size | None = None


class EagleKeys(Keys):
    eagle_aux_hidden_state_layer_ids: list[int] | None = None  # layer outputs; -1 is the input of the first layer
    norm_before_fc: bool | None = None


class HeadstartKeys(Keys):
    """Our own section, written by heads.checkpoint."""

    kind: str = "eagle3"
    taps: Annotated[Layers, Field(min_length=1)] = [0]
    block_size: Size | None = None
    engines: list[str] | None = None
    target: "OriginKeys | None" = None
    target_num_layers: Size = 1
    acceptance_length: dict[str, Number] = {}  # on held-out prompts, by temperature
    target_rope: dict[str, Any] = {}
    calibration: "CalibrationKeys | None" = None


class OriginKeys(Keys):
    """The target that the head was trained for."""

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    source: str | None = None


class TreeKeys(Keys):
    """A searched draft tree: its nodes as ranks from the root, and the chance of each."""

    paths: Annotated[list[Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]], Field(min_length=1)]
    chances: list[Annotated[float, Field(ge=0, le=1)]]

    @model_validator(mode="after")
    def one_chance_each(self) -> "TreeKeys":
        if len(self.paths) != len(self.chances):
            raise ValueError(f"{len(self.paths)} paths have {len(self.chances)} chances; one for each is allowed")
        return self


class CalibrationKeys(Keys):
    greedy: Annotated[list[Number], Field(min_length=1)]
    sampled: Annotated[list[Number], Field(min_length=1)]
    noise: Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=1)] = [1.0]
    tree: TreeKeys | None = None


class ProposalKeys(Keys):
    speculative_tokens: int | None = None


class VerifierKeys(Keys):
    name_or_path: str | None = None


class SpeculatorsKeys(Keys):
    proposal_methods: list[ProposalKeys] | None = None
    verifier: VerifierKeys | None = None


class BlockKeys(Keys):
    """The keys of block heads: in a section of their own in DFlash's files, at the top level in others."""

    block_size: Size | None = None
    mask_token_id: Annotated[int, Field(ge=0)] | None = None
    target_layer_ids: list[int] | None = None  # layer outputs; -1 is the input of the first layer
    sample_from_anchor: bool | None = None
    causal: bool | None = None
    use_swa: bool | None = None
    swa_window_size: Size | None = None
    markov_rank: Annotated[int, Field(ge=0)] | None = None
    markov_head_type: str | None = None
    enable_confidence_head: bool | None = None
    confidence_head_with_markov: bool | None = None


class HeadKeys(LayerKeys, BlockKeys):
    """A whole config.json, in any layout."""

    architectures: list[str] | None = None
    target_hidden_size: Size | None = None
    draft_vocab_size: Size | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None
    norm_before_fc: bool | None = None
    norm_before_residual: bool | None = None
    eagle_aux_hidden_state_layer_ids: Layers | None = None
    eagle_config: EagleKeys | None = None
    dflash_config: BlockKeys | None = None
    aux_hidden_state_layer_ids: Layers | None = None
    num_target_layers: Size | None = None
    sliding_window: Size | None = None
    sliding_window_non_causal: bool | None = None
    is_causal: bool | None = None
    speculators_model_type: str | None = None
    transformer_layer_config: LayerKeys = LayerKeys()
    speculators_config: SpeculatorsKeys | None = None
    headstart: HeadstartKeys = HeadstartKeys()

"""What basp refuses before the first step, by the layer's name and with a remedy, and how it leaves the model."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel

from basp import SequenceParallel, prepare
from basp.casts import keep_float64
from basp.errors import BaspError, BatchError, ModelError, PlanError
from basp.plans import Plan, Shard, Tile
from basp.strategies import basp as basp_strategy
from tests.support import oracle

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


VISION = {
    "head_dim": 8,
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 32,
    "out_hidden_size": 32,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_heads": 4,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
    "num_position_embeddings": 4,
    "deepstack_visual_indexes": [0],
}
AUDIO = {
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "output_dim": 32,
}


def build(name: str, **changes: Any) -> PreTrainedModel:
    """A tiny random model: ``name`` is its class, without "ForCausalLM" where it ends so; sizes are its text part's."""
    model_class = getattr(transformers, f"{name}ForCausalLM", None) or getattr(transformers, name)
    config_class = model_class.config_class
    sizes = {key: value for key, value in {**SMALL, **changes}.items() if value is not ...}
    if "text_config" in config_class.sub_configs:
        sizes = {"text_config": sizes, "vision_config": VISION}
    if "audio_config" in config_class.sub_configs:
        sizes["audio_config"] = AUDIO
    torch.manual_seed(0)
    return model_class(config_class(**sizes))


LLAMA4 = {"attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 32, "head_dim": 8}
EXPERTS = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
LOCAL_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "use_mamba_kernels": False}
ZAMBA2 = {
    "layers_block_type": ["mamba", "hybrid"],
    "mamba_d_state": 8,
    "mamba_ngroups": 1,
    "n_mamba_heads": 4,
    "mamba_headdim": 16,
    "num_key_value_heads": 4,
}
NEMOTRON_H = {
    "layers_block_type": ["mamba", "attention"],
    "num_hidden_layers": ...,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 1,
    "head_dim": 8,
}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "qk_head_dim": 8,
    "v_head_dim": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
}
INDEXED = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
MROPE = {
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
}
FALCON_H1 = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2}
UNDROPPED = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
WHISPER = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 32, "encoder_layers": 1}
GEMMA2 = {"head_dim": 8, "sliding_window": 4}
GEMMA3 = {"sliding_window": 4, "head_dim": 8, "layer_types": ["full_attention", "sliding_attention"]}
GPT_OSS = {"head_dim": 8, "sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1}
QWEN2_MOE = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "use_sliding_window": True,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}

KOSMOS = {
    "embed_dim": 32,
    "layers": 2,
    "attention_heads": 4,
    "ffn_dim": 32,
    "dropout": 0.0,
    "max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 32,
    "factor": 4.0,
}
BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 32,
    "dropout": 0.0,
    "activation_dropout": 0.0,
    "is_encoder_decoder": False,
    "is_decoder": True,
}

WITHOUT = ("linear attention, a state space, or an attention of its own", "train this model without basp")

# What is refused, and the words that its message must have: the layer and what is the matter with it. Not how many
# calls were counted or which of several true reasons came first: that follows the release of transformers.
REFUSED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "kf14 chunks": ("Llama4", LLAMA4, ("layer 0", "chunk", "attention_chunk_size")),
    "kf13 rope that follows the rank's longest position": (
        "Llama",
        {"rope_parameters": LONGROPE, "max_position_embeddings": 128},
        ("LlamaForCausalLM gives a token other queries, keys or values in layer 0", "longrope"),
    ),
    "kf13 rope that follows the length": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        ("LlamaForCausalLM has rope of type dynamic",),
    ),
    "kf15 state space: Mamba": (
        "Mamba",
        {},
        ("MambaForCausalLM", "backbone.layers.0.mixer"),
    ),
    "kf15 state space: Mamba2": (
        "Mamba2",
        {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "num_attention_heads": ...},
        ("backbone.layers.0.mixer (Mamba2Mixer)",),
    ),
    "kf15 state space: FalconMamba": (
        "FalconMamba",
        {"state_size": 8},
        ("backbone.layers.0.mixer (FalconMambaMixer)",),
    ),
    "kf15 recurrence: RWKV": ("Rwkv", {"attention_hidden_size": 32}, ("in rwkv.blocks.0.attention",)),
    "kf15 linear attention: Qwen3-Next": (
        "Qwen3Next",
        {**DELTA, **EXPERTS},
        ("Qwen3NextForCausalLM", "model.layers.0.linear_attn (Qwen3NextGatedDelta", *WITHOUT),
    ),
    "kf15 linear attention: Qwen3.5": (
        "Qwen3_5",
        DELTA,
        ("Qwen3_5ForCausalLM", "in model.layers.0.linear_attn (Qwen3_5Gated", *WITHOUT),
    ),
    "kf15 linear attention: Qwen3.5-MoE": (
        "Qwen3_5Moe",
        {**DELTA, **EXPERTS},
        ("in model.layers.0.linear_attn (Qwen3_5MoeGated",),
    ),
    "kf15 linear attention: Qwen3.5 with images": (
        "Qwen3_5ForConditionalGeneration",
        DELTA,
        ("in model.language_model.layers.0.linear_attn (Qwen3_5Gated",),
    ),
    "kf15 linear attention: Olmo hybrid": ("OlmoHybrid", DELTA, ("in model.layers.0.linear_attn (OlmoHy",)),
    "kf15 linear attention: MiniMax": (
        "MiniMax",
        {**LOCAL_EXPERTS, "head_dim": 8, "layer_types": DELTA["layer_types"]},
        ("MiniMaxForCausalLM", "in model.layers.0.self_attn (MiniMaxLightningAttention)", *WITHOUT),
    ),
    "kf15 linear attention: Kimi Linear": (
        "KimiLinear",
        {**LATENT, "layer_types": DELTA["layer_types"], "linear_num_heads": 2, "linear_head_dim": 8, "num_experts": 2},
        ("in model.layers.0.self_attn (KimiLinearDeltaAttention)",),
    ),
    "kf15 linear attention: Bailing hybrid": (
        "BailingHybrid",
        {**LATENT, "layer_types": DELTA["layer_types"], "num_experts": 4},
        ("in model.layers.0.self_attn (BailingHybridDeltaAttention)",),
    ),
    "kf15 hybrid: Jamba": ("Jamba", JAMBA, ("in model.layers.0.mamba (JambaMambaMixer)",)),
    "kf15 hybrid: Bamba": ("Bamba", {**MAMBA2, "attn_layer_indices": [1]}, ("in model.layers.0.mamba",)),
    "kf15 hybrid: Zamba2": ("Zamba2", ZAMBA2, ("shared_transformer.self_attn)", "in model.layers.0.mamba (Zamba2")),
    "kf15 hybrid: Granite MoE": (
        "GraniteMoeHybrid",
        {**MAMBA2, **LOCAL_EXPERTS, "shared_intermediate_size": 32, "layer_types": ["mamba", "attention"]},
        ("in model.layers.0.mamba (GraniteMoeHybridMamba",),
    ),
    "kf15 hybrid: Nemotron-H": ("NemotronH", NEMOTRON_H, ("in model.layers.0.mixer (NemotronHMamba2",)),
    "kf15 hybrid: RecurrentGemma": (
        "RecurrentGemma",
        {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8, "head_dim": 8},
        ("(in model.layers.2.temporal_block)", "in model.layers.0.temporal_block"),
    ),
    "kf15 hybrid beside attention: Falcon-H1": (
        "FalconH1",
        {**FALCON_H1, "head_dim": 8},
        ("FalconH1ForCausalLM mixes tokens outside of its attention", "in model.layers.0.mamba (FalconH1Mixer)"),
    ),
    "kf15 convolution: Lfm2": (
        "Lfm2",
        {"layer_types": ["conv", "full_attention"]},
        ("Lfm2ForCausalLM", "in model.layers.0.conv (Lfm2ShortConv)"),
    ),
    "kf15 convolution: Lfm2-MoE": (
        "Lfm2Moe",
        {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
        ("in model.layers.0.conv (Lfm2MoeShortConv)",),
    ),
    "kf15 attention called twice: DiffLlama": ("DiffLlama", {}, ("2 times in model.layers.0.self_attn",)),
    "index-sparse attention: DeepSeek-V3.2": (
        "DeepseekV32",
        {**LATENT, **INDEXED},
        ("model.layers.0.self_attn.indexer (DeepseekV32Indexer) chooses", "index-sparse"),
    ),
    "index-sparse attention: GLM-5": (
        "GlmMoeDsa",
        {**LATENT, **INDEXED},
        ("model.layers.0.self_attn.indexer (GlmMoeDsaIndexer) chooses", "index-sparse"),
    ),
    "index-sparse attention: MiniMax-M3": (
        "MiniMaxM3VL",
        {**INDEXED, **LOCAL_EXPERTS, "head_dim": 8, "rotary_dim": 4, "layer_types": ["minimax_m3_sparse"] * 2},
        ("model.layers.0.self_attn.indexer (MiniMaxM3VLIndexer) chooses", "index-sparse"),
    ),
    "compressed keys: DeepSeek-V4": (
        "DeepseekV4",
        {"head_dim": 8},
        ("model.layers.0.self_attn.compressor (DeepseekV4HCACompressor) chooses or makes", "compressed"),
    ),
    "cross attention: GPT2": (
        "GPT2LMHeadModel",
        {**GPT2, **UNDROPPED, "add_cross_attention": True},
        ("transformer.h.0.crossattention (GPT2Attention) is cross attention", "config.add_cross_attention = False"),
    ),
    "cross attention: Bart": (
        "Bart",
        BART,
        ("model.decoder.layers.0.encoder_attn (BartAttention) is cross attention",),
    ),
    "cross attention: Whisper": (
        "Whisper",
        WHISPER,
        ("model.decoder.layers.0.encoder_attn (WhisperAttention) is cross",),
    ),
    "cross attention: Mllama": (
        "Mllama",
        {"cross_attention_layers": [1], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        ("model.layers.1.cross_attn (MllamaTextCrossAttention) is cross attention",),
    ),
    **{
        f"three positions for each token: {name}": (
            f"{name}ForConditionalGeneration",
            {**MROPE, **changes},
            (
                "model.language_model.rotary_emb",
                "takes 3 positions for each token",
                "mrope_section",
                "text family's class",
            ),
        )
        for name, changes in {
            "Qwen2VL": {},
            "Qwen2_5_VL": {},
            "Qwen3VL": {},
            "Qwen3VLMoe": EXPERTS,
            "Qwen2_5OmniThinker": {},
            "Glm4v": {},
            "HunYuanVL": {},
        }.items()
    },
    "a mask rule of its own: GIT": ("Git", {}, ("a mask rule of its own for the layers of Git",)),
    "a config and a mask that differ: PaliGemma": (
        "PaliGemmaForConditionalGeneration",
        {"model_type": "gemma", "head_dim": 8},
        ("a causal mask for the layers of Gemma", "use_bidirectional_attention"),
    ),
    "attention of its own: bloom": (
        "Bloom",
        {},
        ("BloomForCausalLM", "in transformer.h.0.self_attention (BloomAttention)"),
    ),
    "attention of its own: falcon": (
        "Falcon",
        {},
        ("FalconForCausalLM", "in transformer.h.0.self_attention (FalconAttention)"),
    ),
    "attention of its own: mpt": (
        "Mpt",
        {"d_model": 32, "n_heads": 4, "n_layers": 2},
        ("MptForCausalLM", "in transformer.blocks.0.attn (MptAttention)"),
    ),
    "kf32 dropout": (
        "Llama",
        {"attention_dropout": 0.1},
        ("layers.0.self_attn has attention_dropout 0.1", "= 0"),
    ),
    "kf32 dropout by another name": ("GPT2LMHeadModel", GPT2, ("GPT2Attention of layer 0", "attention dropout 0.1")),
    "kf32 residual dropout": ("Phi3", {"resid_pdrop": 0.1}, ("layers.0.resid_attn_dropout", "0.1", "dropout")),
    "kf32 embedding dropout": (
        "GPT2LMHeadModel",
        {**GPT2, **UNDROPPED, "embd_pdrop": 0.2},
        ("transformer.drop ", "0.2", "dropout"),
    ),
    "kf32 router jitter": (
        "Mixtral",
        {"num_local_experts": 2, "num_experts_per_tok": 1, "router_jitter_noise": 0.1},
        ("layers.0.mlp", "jitter", "0.1"),
    ),
    "kf14 window in the mask only": (
        "Phimoe",
        {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
        ("PhimoeAttention of layer 0", "within 4 tokens"),
    ),
    "kf14 window in the mask of some layers only": (
        "Qwen2Moe",
        QWEN2_MOE,
        ("Qwen2MoeAttention of layer 0", "within 4 tokens"),
    ),
    "non-causal attention with a window": (
        "Mistral",
        {"sliding_window": 4, "is_causal": False},
        ("MistralAttention of layer 0", "non-causal attention with a window"),
    ),
    "non-causal attention with windows in some layers": (
        "Gemma3",
        GEMMA3 | {"use_bidirectional_attention": True},
        ("Gemma3Attention of layer 1", "non-causal attention with a window"),
    ),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", REFUSED)
def test_prepare_refuses_and_leaves_the_model_as_it_was(case: str, training: bool) -> None:
    name, changes, words = REFUSED[case]
    model = build(name, **changes).train(training)
    before, modes = model.config._attn_implementation, [module.training for module in model.modules()]
    seed = torch.get_rng_state()
    with pytest.raises(ModelError) as refused:
        prepare(model, SequenceParallel())
    message = str(refused.value)
    for word in words:
        assert word in message
    for part in ("Allowed: ", "To do: "):
        assert part in message
    assert model.config._attn_implementation == before
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), seed)
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.arange(3, 8)[None], use_cache=False).logits
    assert bool(torch.isfinite(logits).all())


ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "T5ForConditionalGeneration": {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4},
    "BartForConditionalGeneration": {**BART, "is_encoder_decoder": True, "is_decoder": False},
}


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_an_encoder_and_a_decoder_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match=rf"^{name} is an encoder and a decoder"):
        prepare(build(name, **ENCODER_DECODERS[name]), SequenceParallel())


class CountingLlama(LlamaForCausalLM):
    """Leaves positions to its own counting, whatever it is given."""

    def forward(self, *, position_ids: Any = None, **more: Any) -> Any:
        return super().forward(**more)


def test_kf13_a_model_that_counts_positions_itself_is_refused() -> None:
    with pytest.raises(ModelError, match="CountingLlama gives a token other queries, keys") as refused:
        prepare(CountingLlama(build("Llama").config), SequenceParallel())
    assert "positions that it counts itself" in str(refused.value)


def test_kf13_a_model_whose_first_token_is_not_at_position_0_is_refused() -> None:
    """Kosmos-2.5 and RoBERTa count from behind the padding token's embedding."""
    name = "Kosmos2_5ForConditionalGeneration"
    with pytest.raises(ModelError, match=f"{name} counts the positions of two tokens otherwise than 0 and 1"):
        prepare(build(name, **KOSMOS), SequenceParallel())


def test_a_failing_forward_is_refused_by_the_module_that_fails() -> None:
    model = build("Llama")
    model.model.layers[1].mlp.up_proj = nn.Linear(31, 32)
    with pytest.raises(ModelError, match=r"fails a forward .* in model\.layers\.1\.mlp\.up_proj \(Linear\)"):
        prepare(model, SequenceParallel())


# What a kernel has to be able to do, and the words of the layer and the wish.
WISHES: dict[str, tuple[str, dict[str, Any], tuple[str, ...] | None]] = {
    "kf14 window": ("Mistral", {"sliding_window": 4}, None),
    "kf14 window in some layers": ("Gemma3", GEMMA3, None),
    "soft cap": ("Gemma2", GEMMA2, ("Gemma2Attention of layer 0", "a soft cap of 50.0 on scores")),
    "kf16 sinks": ("GptOss", GPT_OSS, ("GptOssAttention of layer 0", "attention sinks")),
}


@pytest.mark.parametrize("kernel", ["auto", "eager", "sdpa"])
@pytest.mark.parametrize("case", WISHES)
def test_kf14_kf16_what_a_layer_wants_is_honoured_or_refused_by_kernel(case: str, kernel: str) -> None:
    name, changes, words = WISHES[case]
    model = build(name, **changes)
    before = model.config._attn_implementation
    sp = SequenceParallel(kernel=kernel)
    if kernel != "sdpa" or words is None:
        assert prepare(model, sp) is model
        assert bool(torch.isfinite(sp.loss(model, sp.shard([[3, 4, 5, 6, 7, 8, 9], [7, 6]]))))
        return
    with pytest.raises(ModelError) as refused:
        prepare(model, sp)
    for word in (*words, "kernel 'sdpa'", "Allowed: kernel 'eager'", '"auto"'):
        assert word in str(refused.value)
    assert model.config._attn_implementation == before


def test_a_layer_that_calls_itself_non_causal_is_refused_unless_the_config_says_so() -> None:
    model = build("Llama")
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(ModelError, match=r"LlamaAttention of layer 1 asks for non-causal attention\.") as refused:
        prepare(model, SequenceParallel())
    assert "is_causal = False" in str(refused.value)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Llama", {"is_causal": False}),
        ("Gemma3", {"head_dim": 8, "layer_types": ["full_attention"] * 2, "use_bidirectional_attention": True}),
    ],
    ids=["is_causal", "use_bidirectional_attention"],
)
def test_a_config_that_says_so_makes_attention_bidirectional(name: str, changes: dict[str, Any], kernel: str) -> None:
    batch = [[3, 4, 5, 6, 7], [8], [9, 10, 11]]
    sp = SequenceParallel(kernel=kernel)
    with keep_float64():
        model = build(name, **changes).double()
        right_loss, right = oracle.run_model(model, [batch])
        with oracle.oracle_attention(model):
            right_logits = torch.cat([oracle.logits_of(model, torch.tensor(ids)) for ids in batch])
        theirs = model(input_ids=torch.tensor(batch[:1]), use_cache=False).logits[0]
        oracle.assert_close(right_logits[:5], theirs, "transformers' own logits")
        step = sp.shard(batch)
        loss = sp.loss(prepare(model, sp), step)
        loss.backward()
        oracle.assert_close(model(**step.inputs).logits[0], right_logits, "logits")
        oracle.assert_close(loss, right_loss, "loss")
        oracle.assert_same_grads({name: p.grad for name, p in model.named_parameters()}, right)
    changed = sp.shard([[3, 4, 5, 6, 20], *batch[1:]])
    differs = (model(**changed.inputs).logits != model(**step.inputs).logits)[0].any(-1).tolist()
    assert differs == [True] * 5 + [False] * 4


def test_kf40_prompt_tuning_is_refused_and_lora_is_not() -> None:
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT's own about transformers' deprecations
        virtual = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        prompted = peft.get_peft_model(build("Llama"), virtual)
        wrapped = peft.get_peft_model(build("Llama"), peft.LoraConfig(target_modules=["q_proj"]))
        dropping = peft.get_peft_model(build("Llama"), peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.1))
        sp = SequenceParallel()
        later = peft.get_peft_model(prepare(build("Llama"), sp), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ModelError, match="prompt or prefix tuning"):
        prepare(prompted, sp)
    with pytest.raises(ModelError, match=r"q_proj\.lora_dropout"):
        prepare(dropping, sp)
    assert prepare(wrapped, sp) is wrapped
    losses = [sp.loss(model, sp.shard([[3, 4, 5], [6, 7]])) for model in (wrapped, later)]
    assert torch.equal(*losses)  # adapters are 0 at first


def test_kf37_prepare_refuses_what_is_not_a_transformers_model() -> None:
    with pytest.raises(ModelError, match="a Linear") as refused:
        prepare(nn.Linear(2, 2), SequenceParallel())  # type: ignore[arg-type]
    assert "AutoModelForCausalLM" in str(refused.value)
    assert "basp.attention.attend" in str(refused.value)


def test_prepare_returns_the_same_model_in_the_same_mode_and_twice_is_once() -> None:
    model = build("Llama").eval()
    sp = SequenceParallel()
    assert prepare(model, sp) is model
    assert prepare(model, sp) is model
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert bool(torch.isfinite(sp.loss(model, sp.shard([[3, 4, 5]]))))


# -- a prepared model used wrongly -----------------------------------------------------------------------------------


@pytest.fixture
def sp() -> SequenceParallel:
    return SequenceParallel()


@pytest.fixture
def llama(sp: SequenceParallel) -> PreTrainedModel:
    return prepare(build("Llama"), sp)


def test_loss_of_a_model_that_was_not_prepared(sp: SequenceParallel) -> None:
    model = build("Llama")
    with pytest.raises(ModelError, match="LlamaForCausalLM whose attention ignored the step") as refused:
        sp.loss(model, sp.shard([[3, 4, 5], [6, 7]]))
    assert "basp.prepare" in str(refused.value)


def test_loss_after_the_attention_implementation_was_changed(sp: SequenceParallel, llama: PreTrainedModel) -> None:
    llama.set_attn_implementation("sdpa")
    with pytest.raises(ModelError, match="ignored the step"):
        sp.loss(llama, sp.shard([[3, 4, 5]]))


def test_a_forward_without_a_step_names_both_ways_out(llama: PreTrainedModel) -> None:
    with pytest.raises(ModelError, match="LlamaAttention of layer 0 without a basp step") as refused:
        llama(input_ids=torch.tensor([[3, 4, 5]]))
    assert "sp.shard" in str(refused.value)
    assert 'set_attn_implementation("sdpa")' in str(refused.value)
    llama.set_attn_implementation("sdpa")  # the remedy works
    assert llama(input_ids=torch.tensor([[3, 4, 5]])).logits.shape == (1, 3, 64)


def test_kf19_a_padding_mask_is_refused_and_a_mask_of_ones_is_not(sp: SequenceParallel, llama: PreTrainedModel) -> None:
    step = sp.shard([[3, 4, 5]])
    with pytest.raises(ModelError, match=r"attention_mask of shape \(1, 3\) with masked tokens") as refused:
        llama(**step.inputs, attention_mask=torch.tensor([[0, 1, 1]]))
    assert "without its padding" in str(refused.value)
    plain = llama(**step.inputs).logits
    assert torch.equal(llama(**step.inputs, attention_mask=torch.ones(1, 3, dtype=torch.int64)).logits, plain)


def test_a_batch_of_rows_is_refused(sp: SequenceParallel, llama: PreTrainedModel) -> None:
    step = sp.shard([[3, 4, 5]])
    with pytest.raises(ModelError, match="batch size 2 in LlamaAttention of layer 0"):
        llama(**{**step.inputs, "input_ids": step.input_ids.repeat(2, 1)})


def test_token_ids_of_another_step_are_refused(sp: SequenceParallel, llama: PreTrainedModel) -> None:
    step, other = sp.shard_steps([[[3, 4, 5]], [[3, 4, 5, 6]]])
    wrong = {**step.inputs, "input_ids": other.input_ids, "position_ids": other.position_ids}
    with pytest.raises(BatchError, match="4, 4 and 4 tokens") as refused:
        llama(**wrong)
    assert "the 3 that this rank holds" in str(refused.value)
    assert "one and the same step" in str(refused.value)


# -- bad input to shard ----------------------------------------------------------------------------------------------

OF_INTEGERS = "a 1-D list, array or tensor of at least 1 integer"
SEQUENCES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "no sequence": ([], ("0 sequences", "1 or more", "skip empty batches")),
    "an empty sequence": ([[1, 2], []], ("sequence 1 of shape (0,)", OF_INTEGERS, "drop empty documents")),
    "a padded batch": (torch.ones(1, 2, 3, dtype=torch.int64), ("sequence 0 of shape (2, 3)", "without padding")),
    "2-D": ([[[1, 2], [3, 4]]], ("sequence 0 of shape (2, 2)", OF_INTEGERS)),
    "a sequence for a batch": ([1, 2, 3], ("sequence 0 of shape ()", "a list of sequences")),
    "floats": ([[1.0, 2.0]], ("type float64", OF_INTEGERS)),
    "float tensor": ([torch.ones(3)], ("type float32", OF_INTEGERS)),
    "booleans": ([[True, False]], ("type bool", OF_INTEGERS)),
    "negative": ([[1, 2, -1]], ("sequence 0 has -1 at position 2", "integers from 0", "tokenizer")),
    "ignored index among the ids": ([[1, -100]], ("has -100 at position 1", "integers from 0")),
    "ragged": ([[1, [2, 3]]], ("sequence 0", OF_INTEGERS)),
    "strings": ([["a"]], ("sequence 0", OF_INTEGERS)),
    "None": ([None], ("sequence 0", OF_INTEGERS)),
    "a number": (7, ("a batch of type int", "a list of sequences")),
    "None for a batch": (None, ("a batch of type NoneType", "a list of sequences")),
    "text": ("abc", ("a batch of type str", "a list of sequences")),
}


@pytest.mark.parametrize("case", SEQUENCES)
def test_sequences_that_shard_refuses(sp: SequenceParallel, case: str) -> None:
    sequences, words = SEQUENCES[case]
    with pytest.raises(BatchError) as refused:
        sp.shard(sequences)
    for word in (*words, "Allowed: ", "To do: "):
        assert word in str(refused.value)


LABELS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "of fewer sequences": ([[1, 2, 3]], ("labels of 1 sequences for 2",)),
    "of another length": ([[1, 2, 3], [4]], ("sequence 1 has 2 tokens and 1 labels", "not shifted", "basp shifts")),
    "shifted already": ([[2, 3], [5]], ("sequence 0 has 3 tokens and 2 labels", "not shifted")),
    "negative": (
        [[1, 2, 3], [4, -1]],
        ("labels of sequence 1 has -1", "or -100", "mark tokens without a loss"),
    ),
    "floats": ([[1.0, 2.0, 3.0], [4, 5]], ("labels of sequence 0", "float64")),
    "None inside": ([None, [4, 5]], ("labels of sequence 0",)),
    "ragged": ([[1, 2, [3]], [4, 5]], ("labels of sequence 0",)),
}


@pytest.mark.parametrize("case", LABELS)
def test_labels_that_shard_refuses(sp: SequenceParallel, case: str) -> None:
    labels, words = LABELS[case]
    with pytest.raises(BatchError) as refused:
        sp.shard([[1, 2, 3], [4, 5]], labels)
    for word in (*words, "Allowed: ", "To do: "):
        assert word in str(refused.value)


def test_steps_that_shard_steps_refuses(sp: SequenceParallel) -> None:
    with pytest.raises(BatchError, match="0 micro-batches"):
        sp.shard_steps([])
    with pytest.raises(BatchError, match="micro-batch 1, 0 sequences"):
        sp.shard_steps([[[1]], []])
    with pytest.raises(BatchError, match="micro-batch 1, sequence 0 has -5"):
        sp.shard_steps([[[1]], [[-5]]])
    with pytest.raises(BatchError, match="labels of 1 micro-batches for 2"):
        sp.shard_steps([[[1]], [[2]]], [[[1]]])


# -- strategies of one's own -----------------------------------------------------------------------------------------


def sorted_lengths(lengths, *, ranks, heads, kv_heads, causal=True) -> Plan:
    return basp_strategy(sorted(lengths), ranks=ranks, heads=heads, kv_heads=kv_heads, causal=causal)


def not_causal(lengths, *, ranks, heads, kv_heads, causal=True) -> Plan:
    return basp_strategy(lengths, ranks=ranks, heads=heads, kv_heads=kv_heads, causal=False)


def other_ranks(lengths, *, ranks, heads, kv_heads, causal=True) -> Plan:
    return basp_strategy(lengths, ranks=ranks + 1, heads=heads, kv_heads=kv_heads, causal=causal)


@pytest.mark.parametrize("strategy", [sorted_lengths, not_causal, other_ranks])
def test_a_strategy_that_answers_another_question_is_refused(strategy: Any) -> None:
    with pytest.raises(PlanError, match="strategy"):
        SequenceParallel(strategy=strategy).shard([[1, 2, 3], [4, 5]])


def by_heads(lengths, *, ranks, heads, kv_heads, causal=True) -> Plan:
    """Cuts a sequence in as many shards as it has heads."""
    cuts = sorted({0, lengths[0], *range(0, lengths[0], heads)})
    shards = [Shard(0, start, stop) for start, stop in itertools.pairwise(cuts)]
    tiles = [[Tile(0, 0, heads, 0, lengths[0])]]
    return Plan.of(lengths, heads=heads, kv_heads=kv_heads, shards=[shards], tiles=tiles, causal=causal)


def test_a_strategy_whose_shards_follow_the_heads_is_refused() -> None:
    sp = SequenceParallel(strategy=by_heads)
    model = prepare(build("Llama"), sp)
    with pytest.raises(PlanError, match="shards for 4/2 heads differ from those for 1/1"):
        sp.loss(model, sp.shard([[1, 2, 3, 4, 5, 6]]))


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(BaspError, match="did you mean 'ulysses'"):
        SequenceParallel(strategy="ulises")
    with pytest.raises(BaspError, match="did you mean 'sdpa'"):
        SequenceParallel(kernel="spda")

"""Configurations as transformers writes them become models that trials train, or are refused."""

import json
from dataclasses import replace

import pytest
import transformers

from orchestrator.draft.model_config import model_of_file
from orchestrator.errors import ConfigError
from trials.spec import Experts, LatentAttention

SIZES = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "vocab_size": 4096}
GATED = {**SIZES, "intermediate_size": 1536}


def drafted(tmp_path, config):
    config.save_pretrained(tmp_path / "mine-7b")
    return model_of_file(tmp_path / "mine-7b")


@pytest.mark.parametrize(
    ("config", "kv_heads", "says"),
    [
        (transformers.LlamaConfig(**GATED, num_key_value_heads=2), 2, ()),
        (transformers.MistralConfig(**GATED, num_key_value_heads=4, sliding_window=None), 4, ()),
        (transformers.MistralConfig(**GATED, sliding_window=1024), 8, ("full attention instead of windows of 1024",)),
        (transformers.Qwen2Config(**GATED, num_key_value_heads=2), 2, ("no biases on queries",)),
        (
            transformers.Qwen3Config(**GATED, num_key_value_heads=8, head_dim=128),
            8,
            ("norms", "heads of size 64 instead of 128"),
        ),
        (
            transformers.GemmaConfig(**GATED, num_key_value_heads=1),
            1,
            ("SiLU instead of GELU", "a separate output layer"),
        ),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_gated_decoder_keeps_its_sizes(tmp_path, config, kv_heads, says):
    model = drafted(tmp_path, config)
    shape = model.shape
    assert (shape.hidden_size, shape.num_layers, shape.num_heads, shape.num_kv_heads) == (512, 6, 8, kv_heads)
    assert (shape.ffn_hidden_size, shape.vocab_size) == (1536, 4096)
    assert model.name == "mine-7b"
    assert all(any(word in difference for difference in model.differences) for word in says)
    assert bool(model.differences) == bool(says)


@pytest.mark.parametrize(
    "config",
    [
        transformers.GPTNeoXConfig(**SIZES, intermediate_size=2048),
        transformers.OPTConfig(**SIZES, ffn_dim=2048),
        transformers.GPT2Config(n_embd=512, n_layer=6, n_head=8, vocab_size=4096),
        transformers.FalconConfig(**SIZES, multi_query=False),
    ],
    ids=lambda config: config.model_type,
)
def test_two_matrices_become_three_of_as_many_weights(tmp_path, config):
    model = drafted(tmp_path, config)
    assert model.shape.ffn_hidden_size == 1408  # 2/3 of 2048, in multiples of 128
    assert any("SwiGLU" in difference for difference in model.differences)


def test_weights_match_the_real_model(tmp_path):
    """Of a Llama the draft is the model itself: as many parameters as transformers builds."""
    config = transformers.LlamaConfig(**GATED, num_key_value_heads=2)
    built = transformers.LlamaForCausalLM(config)
    assert drafted(tmp_path, config).num_parameters == sum(weight.numel() for weight in built.parameters())


def test_experts_match_the_real_model(tmp_path):
    config = transformers.MixtralConfig(**GATED, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    built = transformers.MixtralForCausalLM(config)
    model = drafted(tmp_path, config)
    assert model.num_parameters == sum(weight.numel() for weight in built.parameters())
    assert (model.shape.experts.num_experts, model.shape.experts.top_k) == (4, 2)


def test_the_width_of_experts_is_read(tmp_path):
    config = transformers.Qwen3MoeConfig(
        **GATED,
        num_key_value_heads=2,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=96,
        norm_topk_prob=False,
    )
    experts = drafted(tmp_path, config).shape.experts
    assert (experts.num_experts, experts.top_k, experts.ffn_hidden_size, experts.normalizes) == (16, 4, 96, False)


def test_latent_attention_matches_the_real_model(tmp_path):
    """A smaller DeepSeek-V3."""
    sizes = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 12}
    config = transformers.DeepseekV3Config(
        **{**GATED, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2},
        **sizes,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
    )
    model = drafted(tmp_path, config)
    built = transformers.DeepseekV3ForCausalLM(config)
    assert model.num_parameters == sum(weight.numel() for weight in built.parameters())
    assert model.shape.latent == LatentAttention(**sizes) and model.shape.experts.scores == "sigmoid"
    assert "experts chosen from all groups instead of 2 of 4" in model.differences


def test_dense_first_layers_and_shared_experts_are_read(tmp_path):
    """A smaller DeepSeek-MoE 16B, and dots.llm1."""
    sizes = {**GATED, "n_routed_experts": 16, "num_experts_per_tok": 6, "moe_intermediate_size": 96}
    sizes |= {"n_shared_experts": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1}
    deepseek = {**sizes, "model_type": "deepseek", "norm_topk_prob": False, "scoring_func": "softmax"}
    dots = {**sizes, "model_type": "dots1", "n_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
    expected = Experts(num_experts=16, top_k=6, ffn_hidden_size=96, shared_ffn_hidden_size=192, num_dense_layers=1)
    found = {}
    for config in (deepseek, dots):
        file = tmp_path / f"{config['model_type']}.json"
        file.write_text(json.dumps(config))
        found[config["model_type"]] = model_of_file(file)
    assert found["deepseek"].shape.experts == replace(expected, normalizes=False)
    assert found["dots1"].shape.experts == replace(expected, scores="sigmoid")
    assert "weights of experts not multiplied by 2.5" in found["dots1"].differences


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            {
                "model_type": "deepseek_v3",
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
                "kv_lora_rank": 512,
                **GATED,
            },
            ("qk_nope_head_dim", "missing"),
        ),
        ({"model_type": "longcat", "n_routed_experts": 8, **GATED}, ("mixture of experts", "--parameters")),
        ({"model_type": "mixtral", **GATED}, ("num_local_experts", "missing")),
        (
            {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 2, **GATED},
            ("experts in every layer", "decoder_sparse_step"),
        ),
        ({"model_type": "t5", "is_encoder_decoder": True}, ("'t5'", "llama")),
        ({"hidden_size": 12}, ("model_type",)),
        ({"model_type": "llama", "hidden_size": 512}, ("missing", "num_hidden_layers")),
        ({"model_type": "llama", **GATED, "hidden_size": "wide"}, ("hidden_size", "'wide' is not a valid size")),
        ({"model_type": "llama", **GATED, "num_attention_heads": 7}, ("7 heads",)),
        ({"model_type": "resnet", "depths": [1, 1, 1, 1]}, ("depths", "ResNet-50")),
        ([1], ("model_type",)),
    ],
    ids=[
        "latent attention",
        "experts",
        "no experts",
        "alternating",
        "t5",
        "no type",
        "no sizes",
        "text",
        "heads",
        "resnet",
        "list",
    ],
)
def test_unsupported_models_are_refused_with_their_file(tmp_path, content, words):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        model_of_file(file)
    assert str(file) in str(caught.value)
    assert all(word in str(caught.value) for word in words)


def test_a_file_without_a_name_is_named_by_type_and_size(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"model_type": "llama", "num_key_value_heads": 2, **GATED}))
    model = model_of_file(file)
    assert model.name == f"llama-{round(model.num_parameters / 1e6)}m"

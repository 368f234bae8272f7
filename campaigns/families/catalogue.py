"""The model families of the installed transformers: those that are always tried, and further ones drawn by seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import transformers
from transformers.models.auto import modeling_auto

#: The tasks of transformers' automatic classes: a family is built as the model of the first one that it has.
_TASKS = [
    *(
        "IMAGE_TEXT_TO_TEXT",
        "MULTIMODAL_LM",
        "SEQ_TO_SEQ_CAUSAL_LM",
        "SPEECH_SEQ_2_SEQ",
        "MASKED_LM",
        "CAUSAL_LM",
        "CTC",
    ),
    *("IMAGE_CLASSIFICATION", "SEMANTIC_SEGMENTATION", "OBJECT_DETECTION", "MASK_GENERATION", "TEXT_TO_WAVEFORM"),
    "PRETRAINING",
]


@dataclass(frozen=True)
class Family:
    """A family of models: its name, the name of its class in transformers, and settings that replace tiny ones."""

    name: str
    model_class: str
    changes: Mapping[str, Any] = field(default_factory=dict)


#: Settings of families whose smaller configuration is not consistent by itself.
_CHANGES: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"rope_theta": 10000.0}},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "intermediate_size": 64,
        "mamba_d_head": 4,
    },
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "nemotron": {"num_key_value_heads": 8},
    "nemotron_h": {"moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64},
    "vits": {"upsample_initial_channel": 32, "upsample_rates": [4, 4], "upsample_kernel_sizes": [8, 8]},
}

#: Further forms of a family: the family, the class if it is another one, and settings.
_FORMS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "musicgen, decoder": ("musicgen", "MusicgenForCausalLM", {}),
    "bert, pretraining": ("bert", "BertForPreTraining", {}),
    "llama, scaled positions": (
        "llama",
        None,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "phi3, long positions": (
        "phi3",
        None,
        {
            "hidden_size": 64,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [2.0, 2.1, 2.2, 2.3],
                "original_max_position_embeddings": 32,
            },
        },
    ),
}

#: The families that are always tried.
ALWAYS = [
    *("albert", "bart", "bert", "bitnet", "blip", "bloom", "clip", "cohere2", "convnext", "dbrx", "deberta-v2"),
    *("deepseek_v3", "diffllama", "dinov2", "distilbert", "electra", "encodec", "ernie4_5_moe", "falcon", "gemma2"),
    *(
        "gemma3_text",
        "gemma3n_text",
        "glm4",
        "glm4_moe",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "gpt_neox",
        "gpt_oss",
        "gptj",
    ),
    *(
        "granitemoe",
        "granitemoehybrid",
        "hubert",
        "hunyuan_v1_moe",
        "idefics3",
        "jamba",
        "lfm2",
        "llama",
        "llama4_text",
    ),
    *(
        "llava",
        "longformer",
        "m2m_100",
        "mamba",
        "mamba2",
        "marian",
        "minimax",
        "mistral",
        "mixtral",
        "modernbert",
        "mt5",
    ),
    *("nemotron", "nemotron_h", "olmo2", "olmoe", "opt", "paligemma", "phi", "phi3", "qwen2"),
    *("qwen2_5_vl", "qwen2_vl", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl_moe", "recurrent_gemma", "resnet"),
    *("roberta", "rwkv", "sam", "segformer", "siglip", "smollm3", "stablelm", "starcoder2", "swin"),
    *(
        "switch_transformers",
        "t5",
        "vit",
        "vit_mae",
        "vits",
        "wav2vec2",
        "whisper",
        "xlnet",
        "xlstm",
        "yolos",
        "zamba2",
    ),
    *_FORMS,
]


def find_family(name: str) -> Family:
    """Return a family by its name. Raises ``KeyError`` if transformers has none."""
    base, model_class, changes = _FORMS.get(name, (name, None, {}))
    return Family(name, model_class or _classes()[base], {**_CHANGES.get(base, {}), **changes})


def draw_families(seed: int) -> Iterator[Family]:
    """Yield the families that are not always tried, in an order that follows from a seed."""
    names = sorted(_classes().keys() - set(ALWAYS))
    random.Random(seed).shuffle(names)
    yield from map(find_family, names)


@cache
def _classes() -> dict[str, str]:
    """Return the name of a class for each family that transformers has with a public class."""
    mappings = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in _TASKS]
    classes: dict[str, str] = {}
    for mapping in (*mappings, modeling_auto.MODEL_MAPPING_NAMES):
        for name, model_class in mapping.items():
            classes.setdefault(name, model_class if isinstance(model_class, str) else model_class[0])
    return {name: model_class for name, model_class in classes.items() if hasattr(transformers, model_class)}

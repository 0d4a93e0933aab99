"""Trains the tiny Kimi Linear of the experiments: 0.36 M parameters that find a needle in real prose.

    python -m experiments.train --config=configs/train_tiny.py

Expected: about 25 minutes of one core, whichever the twin. Retrieval appears all at once between steps 200 and 500; at
the end the dense model answers all of 24 needles in held-out prose of 512 to 4096 tokens, with a median NLL of 0.002
nats. Harder: 30 needles in 1024 tokens (71% below one nat), a wording that it never saw (88% at 1024 tokens, 54% at
4096). The rotated twin answers as well up to 2048 tokens; at 4096 it loses 3 of 24.

--config.rope=True trains the twin whose branch is rotated, --config.attention=gqa the one with grouped-query attention
in place of MLA; nothing else differs. Give each its own --config.checkpoint and --out.
"""

from ml_collections import ConfigDict, config_dict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.checkpoint = "vestige_jax/checkpoints/tiny_nope"  # written when the last step is done
    config.tokenizer = "vestige_jax/checkpoints/tiny_nope"  # ranks, from `python -m experiments.text.vocabulary`
    config.text = config_dict.placeholder(str)  # file or folder of other text
    config.seed = 0
    config.rope = False
    config.attention = "mla"  # or gqa
    # (tokens, sequences, steps, share of the main template): short first, where retrieval appears soonest.
    config.phases = ((128, 30, 500, 1.0), (256, 15, 700, 0.4), (576, 7, 700, 0.4), (1152, 3, 500, 0.4))

    config.embedding = 0.5
    config.residual = 0.35
    config.rate = 2e-3
    config.warmup = 100
    config.final = 0.02  # share of the rate that is left at the last step
    config.b2 = 0.98
    config.decay = 0.01
    config.clip = 1.0
    config.text_weight = 0.1
    config.needles = (2, 24)

    config.log_every = 20
    config.save_every = 100
    config.check_every = 600
    config.check_trials = 6
    config.checks = (
        *((prefix, 1, "passcode") for prefix in (512, 1024, 4096)),
        (4096, 30, "passcode"),
        (1024, 1, "locker"),
    )
    config.final_trials = 24
    config.final_checks = (
        *((prefix, 1, "passcode") for prefix in (512, 1024, 2048, 4096)),
        *((prefix, 30, "passcode") for prefix in (1024, 2048, 4096)),
        (1024, 1, "locker"),
        (4096, 1, "locker"),
    )

    # Kimi Linear's config.json; layer lists are 1-based.
    config.model = ConfigDict(
        {
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "linear_attn_config": {
                "kda_layers": (1, 3),
                "full_attn_layers": (2, 4),
                "num_heads": 4,
                "head_dim": 16,
                "short_conv_kernel_size": 4,
            },
        }
    )
    # With attention=gqa, instead of the four sizes of MLA: a row is 2 * 16 values and 2 * 16 keys, where MLA has a
    # latent of 32 and a branch of 16; a head reads values of 16 in both.
    config.gqa = ConfigDict({"num_key_value_heads": 2, "head_dim": 16})
    return config

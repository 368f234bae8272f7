"""The conversion target ``deepspeed-universal``: folders that DeepSpeed loads with ``load_universal_checkpoint``.

Source: ``checkpoint/universal_checkpoint.py``, ``runtime/base_optimizer.py``, ``runtime/zero/stage3.py`` and
``runtime/engine.py`` of DeepSpeed 0.19.8.

``formats/registry.py`` names the target: a conversion makes one on every rank.
"""

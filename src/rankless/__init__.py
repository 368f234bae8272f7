"""rankless: checkpoints of distributed PyTorch training. Their bytes depend on the training state, not on the ranks."""

# The public names are in __init__.pyi. Each one is imported when it is first used: importing rankless imports nothing.


def __getattr__(name: str) -> object:
    from rankless.public_names import read_modules  # noqa: PLC0415

    modules = read_modules()
    if name == "__all__":
        return list(modules)
    if name not in modules:
        raise AttributeError(f"module 'rankless' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    from rankless.torch_import import explain_imports  # noqa: PLC0415

    with explain_imports(f"rankless.{name}"):
        return getattr(import_module(modules[name]), name)


def __dir__() -> list[str]:
    from rankless.public_names import read_modules  # noqa: PLC0415

    return list(read_modules())

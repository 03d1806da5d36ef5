"""Finds the parts of a package: a module that defines a part exports EXAMPLES, which the contract suites test.

A new part is one file: its class or function, `EXAMPLES` (name -> instance), and a line in the package's `__init__`.
"""

import importlib
import inspect
import pkgutil


def modules(package):
    """The modules of a package by name, without subpackages."""
    names = [found.name for found in pkgutil.iter_modules(package.__path__) if not found.ispkg]
    return {name: importlib.import_module(f"{package.__name__}.{name}") for name in names}


def classes_with(module, *members):
    """The public classes that a module itself defines and that have all of these members."""
    own = [kind for _, kind in inspect.getmembers(module, inspect.isclass) if kind.__module__ == module.__name__]
    parts = [kind for kind in own if all(any(name in vars(base) for base in kind.__mro__) for name in members)]
    return [kind for kind in parts if not kind.__name__.startswith("_") and not getattr(kind, "_is_protocol", False)]


def examples(package):
    """EXAMPLES of all modules in one table."""
    found = {}
    for module in modules(package).values():
        for name, example in getattr(module, "EXAMPLES", {}).items():
            assert name not in found, f"{module.__name__} has an example {name!r}, but so has another module"
            found[name] = example
    return found


def check_module(package, module, parts):
    """Each of the parts (classes) that a module defines has an example, and the package exports it or its factory."""
    own = getattr(module, "EXAMPLES", {})
    exported = {name: getattr(package, name) for name in package.__all__}
    for part in parts:
        assert any(type(example) is part for example in own.values()), f"{module.__name__} has no example of {part}"
        makes = [one for one in exported.values() if inspect.isfunction(one) and one.__module__ == module.__name__]
        factories = [one for one in makes if one.__annotations__.get("return") == part.__name__]
        assert part in exported.values() or factories, f"{part} is not in __all__ of {package.__name__}"


def public_members(part):
    """The public methods, properties and attributes of a class, without the knobs of a dataclass."""
    knobs = set(getattr(part, "__dataclass_fields__", {}))
    names = {name for kind in part.__mro__[:-1] for name in vars(kind)}
    return {name for name in names if not name.startswith("_")} - knobs


def members_of(protocol):
    """The public members that a protocol demands."""
    return {name for name in (*vars(protocol), *protocol.__annotations__) if not name.startswith("_")}

"""Every possible field, and those that a recipe handles: what tests of completeness compare."""

import functools
import typing

from orchestrator.frameworks.spelling import WORKLOAD, alternatives, field_types, join
from trials.spec import Candidate, Workload


@functools.cache
def all_paths():
    """The paths there can be."""
    return frozenset({*_paths("", Candidate), *_paths(WORKLOAD, Workload)})


@functools.cache
def parts():
    """Paths above others whose presence depends on the value: optional parts, and the types a field can have."""
    return frozenset({*_parts("", Candidate), *_parts(WORKLOAD, Workload)})


def handled(recipe):
    """By path, or part above paths: the framework's names for it; ``()`` where it has none."""
    found = {}
    for setting in recipe.all_settings:
        for path in setting.paths:
            found[path] = (*found.get(path, ()), *setting.names)
    return found


def _paths(prefix, cls):
    found = set()
    for name, hint in field_types(cls).items():
        path, options = join(prefix, name), alternatives(hint)
        if not options:
            found.add(path)
        elif len(options) > 1:
            found.add(f"{path}.kind")
            found.update(*(_paths(f"{path}.{option.kind}", option) for option in options))
        else:
            found |= _paths(path, options[0])
    return found


def _parts(prefix, cls):
    found = set()
    for name, hint in field_types(cls).items():
        path, options = join(prefix, name), alternatives(hint)
        if len(options) > 1:
            for option in options:
                found |= {f"{path}.{option.kind}", *_parts(f"{path}.{option.kind}", option)}
        elif options:
            found |= _parts(path, options[0])
            if type(None) in typing.get_args(hint):
                found.add(path)
    return found

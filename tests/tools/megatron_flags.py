#!/usr/bin/env python3
"""Writes the flags of Megatron-LM's `arguments.py` by group: `megatron_flags.py CLONE > tests/fixtures/megatron-flags.txt`.

It reads the sources without running them, so it needs neither PyTorch nor Megatron-LM's dependencies.
"""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

clone = Path(sys.argv[1])


def show(path):
    """The text of a file of the newest commit; CLONE may have no work tree."""
    return subprocess.run(["git", "-C", clone, "show", f"HEAD:{path}"], check=True, capture_output=True, text=True).stdout


# Dataclasses whose fields become flags, by name.
files = subprocess.run(["git", "-C", clone, "ls-tree", "-r", "--name-only", "HEAD", "megatron"], check=True, capture_output=True, text=True)
classes = {}
for path in files.stdout.split():
    if path.endswith("config.py") or path.endswith("argument_utils.py") or "/config/" in path or "/resilience/" in path or "injector" in path:
        try:
            tree = ast.parse(show(path))
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, node)


def flags_of_call(call):
    return [arg.value for arg in call.args if isinstance(arg, ast.Constant) and str(arg.value).startswith("--")]


def flags_of_class(name, exclude):
    """The flags of the fields of a dataclass and of those it extends."""
    if name not in classes:
        return []
    node = classes[name]
    found = []
    for base in node.bases:
        found += flags_of_class(getattr(base, "id", getattr(base, "attr", "")), exclude)
    for field in node.body:
        if not isinstance(field, ast.AnnAssign) or field.target.id.startswith("_") or field.target.id in exclude:
            continue
        names = []
        for inner in ast.walk(field):
            if isinstance(inner, ast.Constant) and str(inner.value).startswith("--"):
                names.append(inner.value)
        default = getattr(field.value, "value", None) if isinstance(field.value, ast.Constant) else None
        plain = field.target.id.replace("_", "-")
        # A field that is true by default has a flag that turns it off.
        found += names or ([f"--no-{plain}", f"--disable-{plain}"] if default is True else [f"--{plain}"])
    return found


tree = ast.parse(show("megatron/training/arguments.py"))
groups = {}
for function in tree.body:
    if not isinstance(function, ast.FunctionDef) or not function.name.startswith("_add_"):
        continue
    flags = []
    for node in ast.walk(function):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        keywords = {word.arg: word.value for word in node.keywords}
        if name == "add_argument":
            flags += flags_of_call(node)
        elif name.endswith("ArgumentGroupFactory"):
            exclude = keywords.get("exclude")
            exclude = [item.value for item in exclude.elts] if isinstance(exclude, ast.List) else []
            flags += flags_of_class(node.args[0].id, exclude)
    # The titles of groups are given in several ways; the names of the functions are not.
    title = function.name.removeprefix("_add_").removesuffix("_args").removesuffix("_arguments").replace("_", " ")
    groups.setdefault(title, set()).update(flags)

commit = subprocess.run(["git", "-C", clone, "log", "-1", "--format=%H of %as"], check=True, capture_output=True, text=True).stdout.strip()
print(f"# The flags of Megatron-LM's arguments.py by group, commit {commit}.")
print("# Written by tests/tools/megatron_flags.py.")
for title, flags in groups.items():
    print(f"[{title}]")
    print(textwrap.fill(" ".join(sorted(flags)), 120, break_on_hyphens=False))

"""Compares the tables of docs/from-python.md with Python's own package, and the tests that they name with
those that there are: from_python.py PAGE TESTS, the latter as --gtest_list_tests prints them.

Everything public must stand on the page, with all arguments; what stands there must exist, and defaults
must be Python's. Of private modules (_checkpoint, ...) public names are enough.
"""

import enum
import importlib
import inspect
import pathlib
import pkgutil
import re
import sys

import torch
import torch.distributed.algorithms as algorithms
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

page, tests = (pathlib.Path(path).read_text() for path in sys.argv[1:])
problems = []


class Section:
    """The tables of a section: rows of what there is in Python, what it is here, and its tests. Python's
    names stand in the first cell: `name`, `name=default`, `name(argument, argument=default)`."""

    def __init__(self, title):
        text = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## )", page, re.M | re.S)[1]
        rows = [[cell.strip() for cell in line.strip("|").split("|")]
                for line in text.splitlines() if line.startswith("|")]
        heads = [i - 1 for i, row in enumerate(rows) if set(row[0]) == {"-"}]
        self.title = title
        self.rows = [row for i, row in enumerate(rows) if i not in heads and i - 1 not in heads]
        self.defaults = {}  # by name; None where none is given
        self.arguments = {}  # by name: defaults by argument
        for row in self.rows:
            for name, arguments, default in re.findall(r"`([\w.]+)(?:\((.*?)\))?(?:=(.+?))?`", row[0]):
                self.defaults[name] = default or None
                known = self.arguments.setdefault(name, {})
                for argument in filter(None, arguments.split(", ")):
                    known.update([(*argument.lstrip("*").split("="), None)[:2]])

    def complain(self, text):
        problems.append(f"section {self.title}: {text}")

    def need(self, name):
        if name not in self.defaults:
            self.complain(f"`{name}` is missing")
        return name in self.defaults

    def need_arguments(self, name, function):
        """The arguments stand behind the name, which may have several rows."""
        found = dict(self.arguments[name])
        for argument, default in parameters(function):
            if argument not in found:
                self.complain(f"the argument `{argument}` of `{name}` is missing")
            self.compare_default(argument, found.pop(argument, None), default)
        if any(one.kind == one.VAR_KEYWORD for one in inspect.signature(function).parameters.values()):
            return
        for argument in found:
            self.complain(f"`{name}` has no argument `{argument}`")

    def compare_default(self, name, found, default):
        if found is not None and found != repr(default):
            self.complain(f"`{name}={found}` is {default!r} in Python")

    def need_members(self, owner, prefix=""):
        """Public methods and properties that a class has of its own."""
        for name, member in vars(owner).items():
            if isinstance(member, (staticmethod, classmethod)):
                member = member.__func__
            is_special = name in ("__iter__", "__len__")
            if name.startswith("_") and not is_special:
                continue
            if isinstance(member, property):
                self.need(prefix + name)
            elif inspect.isfunction(member) and self.need(prefix + name):
                self.need_arguments(prefix + name, member)

    def refuse_others(self, exists):
        for name in self.defaults:
            if not exists(name) and not has_path(name):
                self.complain(f"Python has no `{name}`")


def parameters(function):
    signature = inspect.signature(function)
    return [(one.name, one.default) for one in signature.parameters.values()
            if one.name not in ("self", "_") and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]


def has_path(name):
    """Whether it is the whole name of something, such as torch.distributed.optim.PostLocalSGDOptimizer."""
    module, _, last = name.rpartition(".")
    return module.startswith("torch.") and hasattr(importlib.import_module(module), last)


def check_class(title, owner):
    section = Section(title)
    for name, default in parameters(owner.__init__):
        if section.need(name):
            section.compare_default(name, section.defaults[name], default)
    section.need_members(owner)
    arguments = dict(parameters(owner.__init__))
    section.refuse_others(lambda name: name in arguments or hasattr(owner, name))
    return section


def check_algorithms():
    section = Section("torch.distributed.algorithms")
    names = set()
    count = 0
    for info in pkgutil.walk_packages(algorithms.__path__, algorithms.__name__ + "."):
        module = importlib.import_module(info.name)
        own = {name: one for name, one in vars(module).items()
               if getattr(one, "__module__", None) == info.name and
               (inspect.isclass(one) or inspect.isfunction(one))}
        short = info.name.rpartition(".")[2]
        names.update(own, [short])
        public = {name: one for name, one in own.items() if not name.startswith("_")}
        if not public and not info.ispkg:
            section.need(short)
        for name, one in public.items():
            count += 1
            if not section.need(name) or "._" in info.name:
                continue
            if inspect.isclass(one) and issubclass(one, enum.Enum):
                names.update(one.__members__)
                for member in one.__members__:
                    section.need(member)
                continue
            section.need_arguments(name, one)
            if inspect.isclass(one):
                names.update(f"{name}.{member}" for member in dir(one))
                section.need_members(one, name + ".")
    if count < 30:
        section.complain(f"only {count} names were found in Python: is the search broken?")
    section.refuse_others(names.__contains__)
    return section


def known_tests():
    """Without what parameters add to names, and without disabled ones: Suite.Name."""
    suite, all = "", set()
    for line in tests.splitlines():
        name = line.partition("#")[0].strip()
        if not line.startswith(" "):
            suite = name.rstrip(".").rpartition("/")[2]
        elif not name.startswith("DISABLED_"):
            all.add(f"{suite}.{name.partition('/')[0]}")
            all.add(f"{suite}.*")
    return all


def check_tests(section, known):
    for row in section.rows:
        if len(row) != 3:
            section.complain(f"{len(row)} cells instead of 3 in the row {row[0]}")
            continue
        python, here, tests_of_row = row
        named = re.findall(r"`([^`]+)`", tests_of_row)
        if here.startswith("none") != (tests_of_row == "-") or (not named and tests_of_row != "-"):
            section.complain(f"give a test, or none with the reason and '-', in the row {python}")
        if here.startswith("none") and not re.match("none: .", here):
            section.complain(f"why is there none, in the row {python}?")
        for name in named:
            if name not in known:
                section.complain(f"there is no test `{name}`, which the row {python} names")


if not torch.__version__.startswith("2.13."):
    sys.exit(f"the page is for PyTorch 2.13, and this is {torch.__version__}")
known = known_tests()
for source in pathlib.Path("tests/multiprocess").glob("*.cpp"):
    known.update(re.findall(r"^const Check (\w+)\(", source.read_text(), re.M))
for section in (check_class("DistributedDataParallel", DistributedDataParallel), check_algorithms(),
                check_class("DistributedSampler", DistributedSampler)):
    check_tests(section, known)
sys.exit("docs/from-python.md:\n" + "\n".join(problems) if problems else 0)

"""argparse with one habit for all commands: --config anywhere, no abbreviations, near misses named."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from tierkv.errors import EXIT_USAGE

Run = Callable[[argparse.Namespace], int | None]


class CommandParser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        choice = re.match(r"argument [^:]*: invalid choice: '([^']*)' \(choose from (.*)\)$", message)
        if choice:
            names = [name.strip().strip("'") for name in choice[2].split(",")]
            near = difflib.get_close_matches(choice[1], names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            message = f"{choice[1]!r} is not one of {', '.join(names)}{hint}"
        print(f"{self.prog}: {message}\nTry '{self.prog} --help'.", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def near_miss(word: str, *parsers: argparse.ArgumentParser) -> str:
    """What the word may have been meant for, of the options that these parsers take themselves."""
    options = {name for parser in parsers for action in parser._actions for name in action.option_strings}
    named = {name.lstrip("-"): name for name in options}
    near = difflib.get_close_matches(word.partition("=")[0].lstrip("-"), named, n=1)
    return f"; did you mean {named[near[0]]}?" if near and word.startswith("-") else ""


def common_options(default: Any = argparse.SUPPRESS) -> argparse.ArgumentParser:
    """--config, accepted before and after the command."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--config",
        metavar="FILE",
        default=default,
        help="the tierkv.toml to use (default: ./tierkv.toml, ~/.config/tierkv/tierkv.toml, /etc/tierkv/tierkv.toml)",
    )
    return common


class Commands:
    """Adds commands to a parser; each gets --config, a one-line help, a description and an example."""

    def __init__(self, subparsers: Any) -> None:
        self._subparsers = subparsers

    def add(
        self, name: str, run: Run, summary: str, *, description: str = "", example: str = "", takes_rest: bool = False
    ) -> CommandParser:
        parser: CommandParser = self._subparsers.add_parser(
            name,
            help=summary,
            description=description or summary[0].upper() + summary[1:] + ".",
            epilog=f"example:\n{example.rstrip()}" if example else None,
            parents=[common_options()],
        )
        parser.set_defaults(run=run, takes_rest=takes_rest, parser=parser)
        return parser

    def group(self, name: str, summary: str, *, example: str = "") -> Commands:
        """A command that has commands of its own; alone it shows its help and exits with 2."""
        parser = self.add(name, lambda _: _help(parser), summary, example=example)
        return Commands(parser.add_subparsers(title="commands", metavar="COMMAND", dest=f"{name}_command"))


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return EXIT_USAGE

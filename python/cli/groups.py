"""Groups of commands: what their errors and interrupts become, in which order they are listed."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from headrace.lake.spark.errors import exit_message
from headrace.logs import tell_error
from headrace.stages import ORDER


class Group(TyperGroup):
    """Turns what the user can mend into one message and exit code 2; a store that is away into 75; Ctrl-C into 130,
    SIGTERM into 143."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, typer.TyperException):  # a group within this one has told what there was
            raise
        except KeyboardInterrupt as e:
            typer.echo("\nstopped. Finished stages are kept: the same command goes on from here.", err=True)
            raise typer.Exit(128 + getattr(e, "signum", 2)) from None
        except Exception as e:
            if (message := exit_message(e)) is None:
                raise
            tell_error(message[0])
            raise typer.Exit(message[1]) from None


class Root(Group):
    """Lists the stages in the day's order, although one of them is a group, which would come last."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        first = min(names.index(s) for s in ORDER)
        other_commands = [n for n in names if n not in ORDER]
        return [*other_commands[:first], *ORDER, *other_commands[first:]]


class StageGroup(Group):
    """`headrace features clicks` is `headrace features build clicks`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["build", *args]
        return super().parse_args(ctx, args)

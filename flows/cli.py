"""The `daybreak` command. Prefect is imported only when a flow has to run.

Exit status: 0 done, 1 failed, 2 bad usage, config or input, 3 held by the gate, 4 nothing due.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from collections.abc import Callable
from datetime import date as Date
from datetime import datetime, timedelta
from typing import Any, NoReturn
from zoneinfo import ZoneInfo

from rich.console import Console, RenderableType

from flows import attributing, erasing, paging, promoting
from flows.checking import check
from flows.servers import end_orphaned_servers
from gr_core import grouping
from gr_core.config import Config, load_config
from gr_core.environment import home_uri, prepare_tools
from gr_core.errors import DaybreakError, UsageError
from gr_core.lake import store
from gr_core.lake.lock import running_night

DONE, FAILED, BAD_INPUT, HELD, NOTHING_DUE = 0, 1, 2, 3, 4


PIPED_WIDTH = 150  # columns of a table that no terminal limits
FIRST_YEAR, LAST_YEAR = 2000, 2261  # times of other years are no events' (`data.expressions.instant`)


class Parser(argparse.ArgumentParser):
    """A parser whose errors go the way of all others: one message, exit status 2."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing usage."""
        raise UsageError(f"{message}; see {self.prog} --help")


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    if threading.current_thread() is threading.main_thread():
        # Prefect crashes the run, then sends itself the signal again: it ends here, and servers are stopped at exit.
        signal.signal(signal.SIGTERM, _interrupt)
    try:
        options = _parser().parse_args(words)
        settings = load_config(options.config, options.set)
        home = home_uri(settings.name, options.home)
        _warn(settings, home)
        value, status = options.run(options, settings, home)
    except DaybreakError as error:
        return _report(error, error.exit_code, where=error.where, as_json="--json" in words)
    except KeyboardInterrupt:
        return _report(
            DaybreakError("interrupted; run it again to go on"), FAILED, where=None, as_json="--json" in words
        )
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 -- one object also for a fault of ours
        return _report(error, FAILED, where=None, as_json="--json" in words)
    _show(options, value, home)
    return int(status)


def _warn(settings: Config, home: str) -> None:
    """Say what is allowed, but was not thought through, as far as the config alone shows it."""
    uncompared = grouping.warning(settings, home)
    if uncompared is not None:
        sys.stderr.write(f"warning: {uncompared}\n")


def _interrupt(_signal: int, _frame: Any) -> NoReturn:
    raise KeyboardInterrupt


def _report(error: BaseException, status: int, *, where: str | None, as_json: bool) -> int:
    if as_json:
        body = {"error": {"type": type(error).__name__, "message": str(error), "where": where}}
        sys.stdout.write(json.dumps(body) + "\n")
    sys.stderr.write(f"daybreak: {type(error).__name__}: {error}\n")
    return status


def _parser() -> Parser:
    common = Parser(add_help=False, allow_abbrev=False)
    common.add_argument("--config", default="conf/world.toml", help="TOML config (default: the embedded world)")
    common.add_argument("--home", help="where state lives (default: DAYBREAK_HOME, else .daybreak/<name>)")
    common.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a dotted config key")
    common.add_argument("--json", action="store_true", help="print exactly one JSON object on stdout")
    parser = Parser(prog="daybreak", description="A nightly training pipeline for generative recommenders")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    night = commands.add_parser(
        "nightly", parents=[common], allow_abbrev=False, help="one night: raw events to a gated model"
    )
    night.add_argument("--date", type=_day, help="lake day YYYY-MM-DD (default: yesterday in the lake's zone)")
    night.add_argument("--next", type=int, metavar="N", help="the next N days after the newest night")
    night.add_argument("--parent", type=_version, metavar="V", help="start from this version, as a separate attempt")
    night.add_argument(
        "--force",
        metavar="STAGE",
        choices=("sequences", "pack", "train", "evaluate"),
        help="repeat a stage of a finished night and compare digests",
    )
    _add_runner(night)
    night.set_defaults(run=_nightly)

    many = commands.add_parser(
        "backfill", parents=[common], allow_abbrev=False, help="nights of a range of days, oldest first"
    )
    many.add_argument("--start", type=_day, required=True)
    many.add_argument("--end", type=_day, required=True)
    _add_runner(many)
    many.set_defaults(run=_backfill)

    status = commands.add_parser("status", parents=[common], allow_abbrev=False, help="nights, champion and findings")
    status.set_defaults(run=_status)

    look = commands.add_parser("check", parents=[common], allow_abbrev=False, help="a day's raw files, without a night")
    look.add_argument(
        "--date",
        type=_day,
        help="lake day YYYY-MM-DD (default: yesterday in the lake's zone; of an embedded world its next)",
    )
    look.set_defaults(run=check)

    erasing.add_commands(commands, common, day=_day, number=_version)
    promoting.add_commands(commands, common, _version)

    where = commands.add_parser(
        "attribute", parents=[common], allow_abbrev=False, help="where training's time goes, on the newest night's pack"
    )
    attributing.add_options(where)
    where.set_defaults(run=attributing.attribute)

    paging.add_command(commands, common, _day)

    config = commands.add_parser("config", help="the resolved config")
    show = config.add_subparsers(required=True, metavar="ACTION").add_parser(
        "show", parents=[common], allow_abbrev=False
    )
    show.set_defaults(run=_config_show)
    return parser


def _add_runner(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--runner", choices=("threads", "ray"), default="threads", help="where buckets are built (default: threads)"
    )


def _day(text: str) -> Date:
    try:
        day = Date.fromisoformat(text)
    except ValueError as error:
        raise UsageError(f"a day is written YYYY-MM-DD, got {text!r} ({error})", where="date") from error
    if not FIRST_YEAR <= day.year <= LAST_YEAR:
        raise UsageError(f"a lake day is of the years {FIRST_YEAR} to {LAST_YEAR}, got {text}", where="date")
    return day


def _version(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"a version is a number from 1 on, got {text!r}", where="version")
    return int(text)


def _nightly(options: argparse.Namespace, settings: Config, home: str) -> tuple[dict[str, Any], int]:
    if options.next is not None:
        if options.next < 1 or options.date or options.parent or options.force:
            raise UsageError("--next takes a number from 1 on, and no --date, --parent or --force", where="next")
        return _next_nights(options, settings, home)
    day = options.date or datetime.now(ZoneInfo(settings.lake.zone)).date() - timedelta(days=1)
    status = _one_night(options, settings, home, day)
    if "forced" in status:
        return status, DONE if status["forced"]["equal"] else FAILED
    return status, exit_status(status)


def _one_night(options: argparse.Namespace, settings: Config, home: str, day: Date) -> dict[str, Any]:
    """Run a night unless it is finished or already running; bad input ends it before Prefect starts."""
    from gr_core.night import night_key
    from gr_core.stages import ingesting, outcome

    key = night_key(day, options.parent)
    done = outcome.finished(home, key)
    if done is not None and options.force is None:
        sys.stderr.write(f"night {key} is finished ({done['state']}, {done['gate']}); nothing to do\n")
        return done
    if options.force is not None and not outcome.opened(home, key):
        raise UsageError(
            f"--force repeats a stage of an earlier night, and there was no night {key}; name one with --date",
            where="force",
        )
    if running_night(home, watch=True) == key:
        sys.stderr.write(f"night {key} is already running; this start ends\n")
        return {"date": key, "state": "running", "reasons": [f"night {key} is already running; this start ends"]}
    if done is None:
        ingesting.preflight(settings, home, day)
    _prepare(home)
    from flows.nightly import nightly

    result: Any = nightly(
        config=options.config,
        date=day,
        parent=options.parent,
        force=options.force,
        home=home,
        overrides=options.set,
        runner=options.runner,
    )
    return dict(result)


def _prepare(home: str) -> None:
    """Make ready for Prefect: its state in the home, and no server left behind there by a killed run."""
    end_orphaned_servers(prepare_tools(home))


def _next_nights(options: argparse.Namespace, settings: Config, home: str) -> tuple[dict[str, Any], int]:
    from gr_core.stages import outcome

    nights = []
    for _ in range(options.next):
        day = outcome.next_day(settings, home)
        if settings.source.world is None and day >= datetime.now(ZoneInfo(settings.lake.zone)).date():
            raise UsageError(f"the next day is {day}, which is not over yet in {settings.lake.zone}", where="next")
        nights.append(_one_night(options, settings, home, day))
    return {"nights": nights}, exit_status(nights[-1])


def _backfill(options: argparse.Namespace, settings: Config, home: str) -> tuple[dict[str, Any], int]:
    if options.end < options.start:
        raise UsageError(f"--end {options.end} lies before --start {options.start}; swap them", where="end")
    from gr_core.stages import ingesting, outcome

    days = [options.start + timedelta(days=n) for n in range((options.end - options.start).days + 1)]
    open_days = [day for day in days if outcome.finished(home, day.isoformat()) is None]
    if open_days:
        ingesting.preflight(settings, home, open_days[0])
        _prepare(home)
        from flows.backfill import backfill

        same: dict[str, Any] = {"config": options.config, "home": home, "overrides": options.set}
        backfill(start=options.start, end=options.end, runner=options.runner, **same)
    nights = [outcome.finished(home, day.isoformat()) or {"date": day.isoformat(), "state": "running"} for day in days]
    return {"nights": nights}, exit_status(nights[-1])


def _status(_options: argparse.Namespace, settings: Config, home: str) -> tuple[dict[str, Any], int]:
    from gr_core.stages import outcome

    today = datetime.now(ZoneInfo(settings.lake.zone)).date()
    now_us = round(datetime.now(ZoneInfo("UTC")).timestamp() * 1e6)
    return outcome.status(settings, home, today, now_us=now_us, running=running_night(home)), DONE


def _config_show(_options: argparse.Namespace, settings: Config, _home: str) -> tuple[dict[str, Any], int]:
    return {"config": settings.resolved(), "fingerprint": settings.fingerprint()}, DONE


def exit_status(night: dict[str, Any]) -> int:
    """Return a night's exit status: 0 promoted (or running elsewhere), 1 failed, 3 held, 4 nothing due."""
    if night["state"] in ("failed", "cancelled"):
        return FAILED
    if night["state"] == "no_data":
        return NOTHING_DUE
    return HELD if night.get("gate") == "held" else DONE


def _show(options: argparse.Namespace, value: dict[str, Any], home: str) -> None:
    """Print the one JSON object, or the table a person reads."""
    if options.json:
        sys.stdout.write(json.dumps(value) + "\n")
        return
    if options.run is _config_show:
        Console().print_json(json.dumps(value))
        return
    if options.run in _TOLD:
        sys.stdout.write(_TOLD[options.run](value))
        return
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    table = _table(options, value)
    if table is not None:
        Console(width=width).print(table)
        return
    from gr_core.report.status import render_status

    if "forced" in value:
        was, now = ([pair[side] for pair in value["forced"]["digests"]] for side in (0, 1))
        word = "equal" if value["forced"]["equal"] else f"DIFFERENT: was {was}, now {now}"
        sys.stdout.write(f"forced {value['forced']['stage']} of {value['date']}: {word}\n")
        return
    nights = value.get("nights", [value])
    shown = value if "champion" in value else {"champion": None, "findings": [], "nights": nights}
    Console(width=width).print(render_status(shown))
    if store.is_local(home):
        Console(stderr=True).print(f"home: {store.local_path(home)}", style="dim")


_TOLD: dict[Any, Callable[[dict[str, Any]], str]] = {
    erasing.forget: erasing.told,
    erasing.retract: erasing.told,
    paging.page: paging.told,
    promoting.promote: promoting.told,
    promoting.rollback: promoting.told,
}


def _table(options: argparse.Namespace, value: dict[str, Any]) -> RenderableType | None:
    """Return the tables of a command that has its own; None: nights are shown."""
    if options.run is check:
        from gr_core.report.checked import render_check

        return render_check(value)
    if options.run is attributing.attribute:
        from gr_core.report.attributed import render_attribution

        return render_attribution(value)
    if options.run is promoting.compare:
        from gr_core.report.compared import render_comparison

        return render_comparison(value)
    return None


if __name__ == "__main__":
    sys.exit(main())

"""Messages about the hub, for models and data sets: its libraries are quiet, their errors are one line."""

import importlib
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import click

from gqa.checkpoint.errors import explain

LOG_IN = "log in with `hf auth login` or set HF_TOKEN"
# Whether a caller from Python wants no progress bars.
without_bars: ContextVar[bool] = ContextVar("without_bars", default=False)


@contextmanager
def quiet(library: str) -> Iterator[None]:
    """Without the messages of `huggingface_hub` or `datasets` (what fails is raised) and, with --quiet, `without_bars`
    or where nobody sits before it, without their progress bars; or as their environment variables say.
    """
    command = click.get_current_context(silent=True)
    utils: Any = importlib.import_module(f"{library}.utils")
    level, shown = utils.logging.get_verbosity(), not utils.are_progress_bars_disabled()
    if level == logging.WARNING:  # nobody asked for another
        utils.logging.set_verbosity(logging.CRITICAL)
    if shown and (without_bars.get() or not sys.stderr.isatty() or (command and command.params.get("quiet"))):
        with warnings.catch_warnings(action="ignore"):  # that a variable says otherwise, and goes first
            utils.disable_progress_bars()
    try:
        with quiet("huggingface_hub") if library == "datasets" else nullcontext():  # by which it fetches
            yield
    finally:
        utils.logging.set_verbosity(level)
        if shown:
            utils.enable_progress_bars()


def error_chain(error: BaseException) -> list[BaseException]:
    """An error and what it was raised from or while handling, as a traceback shows them."""
    chain = [error]
    while cause := chain[-1].__cause__ or (None if chain[-1].__suppress_context__ else chain[-1].__context__):
        if cause in chain:
            break
        chain.append(cause)
    return chain


def is_unreachable(error: BaseException) -> bool:
    """Offline, or the client (httpx, or httpx2 from huggingface_hub 2 on) failed before there was an answer."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    chain = error_chain(error)
    answered = any(isinstance(e, HfHubHTTPError) for e in chain)
    return not answered and any(isinstance(e, OfflineModeIsEnabled) or _is_transport(e) for e in chain)


def _is_transport(error: BaseException) -> bool:
    return type(error).__module__.startswith("httpx")


def hub_reason(error: BaseException, repo: str, revision: str | None = None, data_set: bool = False) -> str | None:
    """Why a repository cannot be read, and what to do about it; None if the hub is not the cause."""
    from huggingface_hub import constants, errors

    chain = error_chain(error)
    kind, folder = ("data set", "datasets/") if data_set else ("repository", "")
    what = f"the data set {repo}" if data_set else repo
    offline = f"{what} is not completely in the cache {constants.HF_HUB_CACHE} while HF_HUB_OFFLINE is set; "
    offline += "unset it to use the hub"
    gated = f"{what} is gated: accept its terms at {constants.ENDPOINT}/{folder}{repo}, then {LOG_IN} of that account"
    texts = {
        errors.OfflineModeIsEnabled: offline,
        errors.GatedRepoError: gated,
        errors.RevisionNotFoundError: f"{what} at the hub has no revision {revision!r}; give a branch, a tag or a "
        "whole commit id",
        errors.RepositoryNotFoundError: f"the hub shows no {kind} {repo}: check the name; if it is private, {LOG_IN} "
        "of an account that has access",
        errors.HFValidationError: f"{repo!r} is no hub id (owner/name of letters, digits, '-', '_' and '.')",
    }
    for error_class, text in texts.items():
        if any(isinstance(e, error_class) for e in chain):
            return text
    if constants.HF_HUB_OFFLINE and isinstance(error, ConnectionError):  # what `datasets` raises then
        return offline
    if "is a gated dataset" in str(error):  # nor does it say by what it was stopped
        return gated
    if answered := next((e for e in chain if isinstance(e, errors.HfHubHTTPError)), None):
        status = answered.response.status_code
        advice = f"wait, or {LOG_IN} of an account that may do that" if status < 500 else "try again later"
        return f"the hub answered {status} for {what}; {advice}"
    if failed := next((e for e in chain if _is_transport(e)), None):
        return (
            f"the hub at {constants.ENDPOINT} cannot be reached ({explain(failed)}); check the connection, HF_ENDPOINT "
            "and the proxy, or set HF_HUB_OFFLINE=1 to use what is in the cache"
        )
    return None

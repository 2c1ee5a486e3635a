"""What is said where the hub is used, for models and data sets: its libraries quiet, their errors in one line."""

import importlib
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import click

from gqa.checkpoint.errors import explain, listing

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
    """What stands between here and a repository, and what to do about it; None where the hub has no part in it."""
    from huggingface_hub import constants, errors, get_token

    chain = error_chain(error)
    what = f"the data set {repo}" if data_set else repo
    path = f"{constants.ENDPOINT}/{'datasets/' if data_set else ''}{repo}"
    has_token = get_token() is not None
    offline = f"{what} is not completely in the cache {constants.HF_HUB_CACHE} while HF_HUB_OFFLINE is set; "
    offline += "unset it to use the hub"
    gated = f"{what} is gated: accept its terms at {path}, then "
    gated += f"use a token of that account (the present one has no access): {LOG_IN}" if has_token else LOG_IN
    unknown = f"the hub shows no {'data set' if data_set else 'repository'} {repo}: check the name; if it is private, "
    unknown += f"the present token has no access, {LOG_IN} of one that has" if has_token else LOG_IN
    texts = {
        errors.OfflineModeIsEnabled: offline,
        errors.GatedRepoError: gated,
        errors.RevisionNotFoundError: f"{what} at the hub has no revision {revision!r}; ",
        errors.RepositoryNotFoundError: unknown,
        errors.HFValidationError: f"{repo!r} is no hub id (owner/name of letters, digits, '-', '_' and '.')",
    }
    for kind, text in texts.items():
        if any(isinstance(e, kind) for e in chain):
            return text + (_revisions(repo, data_set) if kind is errors.RevisionNotFoundError else "")
    if constants.HF_HUB_OFFLINE and isinstance(error, ConnectionError):  # what `datasets` raises then
        return offline
    if "is a gated dataset" in str(error):  # nor does it say by what it was stopped
        return gated
    if answered := next((e for e in chain if isinstance(e, errors.HfHubHTTPError)), None):
        status = answered.response.status_code
        return f"the hub answered {status} for {what}: {_advice(status)}"
    if failed := next((e for e in chain if _is_transport(e)), None):
        cached = ", or set HF_HUB_OFFLINE=1 to use what is in the cache" if data_set else ""
        return (
            f"the hub at {constants.ENDPOINT} cannot be reached ({explain(failed)}); check the connection, HF_ENDPOINT "
            f"and the proxy{cached}"
        )
    return None


def _advice(status: int) -> str:
    if status == 401:
        return f"the token is not valid, or there is none: {LOG_IN}"
    if status == 403:
        return f"the token may not do that: {LOG_IN} with one that has the permission"
    if status == 429:
        return f"too many requests; wait, or {LOG_IN}"
    return "the hub is in trouble; try again later" if status >= 500 else "see its status page and try again"


def _revisions(repo: str, data_set: bool) -> str:
    """The branches and tags that there are; asked for only where a revision was not found."""
    from huggingface_hub import HfApi

    general = "give a branch, a tag or a whole commit id"
    try:
        refs = HfApi().list_repo_refs(repo, repo_type="dataset" if data_set else None)
    except Exception:  # whatever the hub answers: this is only advice
        return general
    names = [ref.name for ref in [*refs.branches, *refs.tags]]
    return f"{general}; it has {listing(names)}" if names else general

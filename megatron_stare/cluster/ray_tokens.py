"""Sets up Ray's token authentication in this process, and undoes it after the Ray session."""

from __future__ import annotations

import os

from ray import exceptions as said
from ray._private.authentication.authentication_token_generator import (
    generate_new_authentication_token,
)
from ray._private.authentication.authentication_token_setup import (
    generate_and_save_token,
    maybe_enable_token_auth_if_token_available,
)
from ray._raylet import (  # type: ignore[attr-defined]
    AuthenticationTokenLoader,
    Config,
    GcsClient,
)

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


def unset() -> frozenset[str]:
    """Returns the names of the environment variables of token authentication that are not set."""
    return frozenset({MODE, TOKEN} - os.environ.keys())


def forget(names: frozenset[str]) -> None:
    """Removes the environment variables `names`, which a Ray session may have set. Ray caches the
    values of these variables, so `forget` also empties Ray's caches. The next Ray session of this
    process can then decide anew whether to use token authentication."""
    for name in names:
        os.environ.pop(name, None)
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def require_token() -> None:
    """Makes sure that Ray finds a token when this process starts Ray. Does nothing if a variable of
    token authentication is set or if the user already has a token. Otherwise, writes a new token to
    ~/.ray/auth_token. The write fails, for example, in a container whose user has no home
    directory. After a failed write, the token is only in the environment of this process and of its
    child processes. If there is no token when Ray starts, Ray itself writes a token to
    ~/.ray/auth_token. If Ray's write fails, Ray does not start. If `require_token` has made a token
    before Ray starts, Ray finds this token, and Ray's own write is not needed."""
    loader = AuthenticationTokenLoader.instance()
    given = os.environ.keys() & {MODE, TOKEN, TOKEN_PATH}
    if given or loader.has_token(ignore_auth_mode=True):
        return
    try:
        generate_and_save_token()
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        os.environ[TOKEN] = generate_new_authentication_token()
    loader.reset_cache()


def authenticate(address: str) -> None:
    """Connects to the head of the Ray cluster at `address`. Switches on Ray's token authentication
    in this process and its child processes if the head requires a token. If the user has a token,
    the command `ray start` by default starts a head that requires a token. By default, a run that
    starts Ray itself leaves a token in the user's file ~/.ray/auth_token. By default, a cluster
    that scripts/ray_up.sh started neither asks for tokens nor sends tokens. A driver with token
    authentication would refuse calls from a cluster that sends no tokens, so no actor would start.
    Does nothing if RAY_AUTH_MODE is set."""
    if MODE in os.environ:
        return
    try:
        GcsClient(address=address)
    except said.AuthenticationError:
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    except Exception:  # `ray.init` says what is wrong
        return

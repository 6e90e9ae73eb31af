"""Who may call what. Denies by default: a method without a policy is refused to everybody.

Access tokens are checked offline with the newest key set, so calls go on while the registry is away. An API
key is taken only by methods whose policy says so, which then take nothing else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum

import grpc
import grpc.aio

from services.chassis.handlers import Context, Continuation, Handler, wrap_handler
from shoal.wire.clock import now_s
from shoal.wire.errors import NotAuthenticated, NotPermitted
from shoal.wire.tokens import Claims, KeySet, Role

HEALTH_SERVICE = "grpc.health.v1.Health"
REFLECTION_SERVICE = "grpc.reflection.v1alpha.ServerReflection"
MAX_CREDENTIAL_CHARACTERS = 4096

_claims: ContextVar[Claims] = ContextVar("claims")


class Scheme(StrEnum):
    """Kind of credentials in the `authorization` metadata."""

    BEARER = "Bearer"
    API_KEY = "ApiKey"


@dataclass(frozen=True, slots=True)
class MethodPolicy:
    """Which roles may call a method, with which kind of credentials."""

    roles: frozenset[Role]
    scheme: Scheme = Scheme.BEARER


Policy = Mapping[str, MethodPolicy]


def allow(*roles: Role, scheme: Scheme = Scheme.BEARER) -> MethodPolicy:
    """Return a policy for these roles; for every role if none is named."""
    return MethodPolicy(frozenset(roles or Role), scheme)


def current_claims() -> Claims:
    """Return who makes the call that is being answered.

    Raises:
        NotAuthenticated: outside a call, and in calls that need no credentials.
    """
    claims = _claims.get(None)
    if claims is None:
        raise NotAuthenticated("this call carries no credentials")
    return claims


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Lets a call through only if `policy` has its full method name (`/package.Service/Method`) and the caller's role.

    `key_set` gives the newest keys at each call. `check_api_key` turns an API key into claims or raises
    NotAuthenticated; without it no API key is accepted.
    """

    def __init__(
        self,
        policy: Policy,
        key_set: Callable[[], KeySet],
        check_api_key: Callable[[str], Awaitable[Claims]] | None = None,
    ) -> None:
        self.policy = policy
        self._key_set = key_set
        self._check_api_key = check_api_key

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Check the caller before a request is read, then wrap the method's handler.

        Raises:
            NotAuthenticated, NotPermitted: if the call is refused; `ErrorInterceptor` tells the caller.
        """
        method = handler_call_details.method
        if method.startswith(f"/{HEALTH_SERVICE}/"):
            return await continuation(handler_call_details)
        sent = [value for key, value in handler_call_details.invocation_metadata if key == "authorization"]
        claims = await self._authorise(method, sent)
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # grpc answers UNIMPLEMENTED

        @asynccontextmanager
        async def around(_: Context) -> AsyncIterator[None]:
            reset = _claims.set(claims)
            try:
                yield
            finally:
                _claims.reset(reset)

        return wrap_handler(handler, around)

    async def _authorise(self, method: str, credentials: list[str | bytes]) -> Claims:
        policy = self._policy_of(method)
        scheme, secret = _parse_credentials(credentials)
        if policy is None:
            self._key_set().verify(secret, now_s())  # a stranger is not told which methods exist
            raise NotPermitted(f"{method} is open to nobody")
        if scheme != policy.scheme:
            raise NotAuthenticated(f"{method} takes metadata `authorization: {policy.scheme} ...`, not {scheme}")
        claims = await self._identify(policy.scheme, secret)
        if claims.role not in policy.roles:
            wanted = ", ".join(sorted(policy.roles))
            raise NotPermitted(f"{method} needs the role {wanted}; account {claims.account} is {claims.role}")
        return claims

    def _policy_of(self, method: str) -> MethodPolicy | None:
        if method.startswith(f"/{REFLECTION_SERVICE}/"):
            return allow()
        return self.policy.get(method)

    async def _identify(self, scheme: Scheme, secret: str) -> Claims:
        if scheme is Scheme.BEARER:
            return self._key_set().verify(secret, now_s())
        if self._check_api_key is None:
            raise NotAuthenticated("this service takes no API keys; use an access token")
        return await self._check_api_key(secret)


def _parse_credentials(values: list[str | bytes]) -> tuple[Scheme, str]:
    if len(values) != 1:
        found = "no credentials" if not values else "several credentials"
        raise NotAuthenticated(f"{found}: send exactly one `authorization` metadata, with an access token")
    value = values[0]
    scheme, _, secret = (value if isinstance(value, str) else "").partition(" ")
    if scheme not in list(Scheme) or not secret or len(secret) > MAX_CREDENTIAL_CHARACTERS:
        raise NotAuthenticated("the `authorization` metadata must be `Bearer TOKEN` or `ApiKey KEY`")
    return Scheme(scheme), secret

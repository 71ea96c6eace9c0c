"""What an object store refused, in one sentence: expired or wrong credentials, a missing bucket, a dead endpoint.

s3fs, deltalake, Polars and boto3 each wrap a store's answer in their own way, and some quote its body, in which a
store repeats the key id or the token. So nothing of the answer is passed on but its code, and the original error is
not chained: a traceback in a log would print it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from gr_core.environment import without_secrets
from gr_core.errors import ConfigError, DaybreakError, StoreUnavailable
from gr_core.lake import uris

_GET_NEW = (
    "get new ones (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, or the profile's) and run it again"
)
_ID = "check AWS_ACCESS_KEY_ID, or the profile in AWS_PROFILE"
_REGION = "set AWS_REGION to the bucket's region, or check AWS_ENDPOINT_URL"
_ALLOW = "allow s3:ListBucket, s3:GetObject, s3:PutObject and s3:DeleteObject there, or use other credentials"
# code -> what it means, what to do
_REFUSED = {
    "ExpiredToken": ("the credentials have expired", _GET_NEW),
    "ExpiredTokenException": ("the credentials have expired", _GET_NEW),
    "TokenRefreshRequired": ("the credentials have expired", _GET_NEW),
    "InvalidToken": ("the session token is not valid", _GET_NEW),
    "InvalidAccessKeyId": ("the store does not know the access key id", _ID),
    "InvalidClientTokenId": ("the store does not know the access key id", _ID),
    "UnrecognizedClientException": ("the store does not know the access key id", _ID),
    "SignatureDoesNotMatch": ("the secret key does not fit the access key id", "check AWS_SECRET_ACCESS_KEY"),
    "AccessDenied": ("these credentials may not do this", _ALLOW),
    "AllAccessDisabled": ("these credentials may not do this", _ALLOW),
    "AccountProblem": ("the account is not in order", "ask the account's owner"),
    "RequestTimeTooSkewed": ("this machine's clock is wrong", "set it"),
    "AuthorizationHeaderMalformed": ("the request was signed for another region", _REGION),
    "PermanentRedirect": ("the bucket is in another region", _REGION),
    "InvalidBucketName": ("that is no name of a bucket", "correct it"),
    "NoSuchBucket": ("there is no such bucket", "make it, or name another with --home or source.root"),
    "NoCredentials": ("no credentials were found", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"),
    "Forbidden": ("these credentials may not do this", _ALLOW),
}
_STATUS = {"403": "Forbidden", "301": "PermanentRedirect"}  # an answer to HEAD has no body that says more
_MISSING_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError")
_LIBRARIES = ("botocore", "boto3", "aiobotocore", "aiohttp", "s3transfer")
# what says most comes first: object_store writes "403 Forbidden" before the body that names the reason
_CODES = [
    re.compile(r"<Code>\s*(\w+)\s*</Code>"),
    re.compile(r"An error occurred \((\w+)\)"),
    re.compile(r"\b(" + "|".join(code for code in _REFUSED if code != "Forbidden") + r")\b"),
    re.compile(r"\b(?:403 )(Forbidden)\b"),
]
_NO_CREDENTIALS = re.compile(r"no providers in chain|credential provider was not enabled|loading credentials", re.I)
_STORE_WORDS = ("Generic S3 error", "object-store error", "Error performing ", "<Code>", "error occurred (")
_NOISE = re.compile(r"\x1b\[\d*m|<[^>]*>[^<]*|[\s↳]+")
_LONGEST = 300


def named(uri: str, error: BaseException) -> DaybreakError | None:
    """Return what an error of a storage library means; None where it is no trouble with the object store.

    Args:
        uri: What was read or written.
        error: Any exception, as s3fs, deltalake, Polars or boto3 raised it.

    Returns:
        ConfigError for what only a person can mend (credentials, rights, a missing bucket), StoreUnavailable for
        what may pass. Neither holds a credential, nor text of the store beyond its error code.
    """
    if uris.scheme(uri) != "s3" or isinstance(error, DaybreakError):
        return None
    chain = list(_chain(error))
    if not any(_of_store(one) for one in chain):
        return None
    code = next((found for one in chain if (found := _code(one))), None)
    bucket = uri.removeprefix("s3://").partition("/")[0]
    if code in _REFUSED:
        what, remedy = _REFUSED[code]
        return ConfigError(f"bucket {bucket}: {what} ({code}) for {uri}; {remedy}", where=uri)
    if isinstance(error, FileNotFoundError):
        return None
    said = f"{type(error).__name__} {code}" if code else f"{type(error).__name__}: {_short(str(error))}"
    return StoreUnavailable(
        f"{uri} did not answer ({without_secrets(said)}); check that AWS_ENDPOINT_URL is right and the store is up, and "
        "run it again",
        where=uri,
    )


def is_unclear(error: BaseException) -> bool:
    """Tell whether the store gave a bare status: an answer to HEAD, or to no credentials, does not name the reason."""
    return any(_bare(one) in ("400", "403", "404", "301") or _code(one) == "Forbidden" for one in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _code(error: BaseException) -> str | None:
    """Return the store's error code, from the answer itself or from the text that a library made of it."""
    if type(error).__name__ in _MISSING_CREDENTIALS:
        return "NoCredentials"
    if (bare := _bare(error)) is not None:
        return _STATUS.get(bare, bare)
    text = str(error)
    found = next((match for pattern in _CODES if (match := pattern.search(text))), None)
    if found is not None:
        return _STATUS.get(found.group(1), found.group(1))
    return "NoCredentials" if _NO_CREDENTIALS.search(text) else None


def _bare(error: BaseException) -> str | None:
    answer = getattr(error, "response", None)
    return str(answer.get("Error", {}).get("Code", "")) or None if isinstance(answer, dict) else None


def _of_store(error: BaseException) -> bool:
    return (
        isinstance(error, TimeoutError | ConnectionError)
        or type(error).__module__.partition(".")[0] in _LIBRARIES
        or any(word in str(error) for word in _STORE_WORDS)
    )


def _short(text: str) -> str:
    """Return an error's text on one line, without colours and without the body that a store sent."""
    return _NOISE.sub(" ", text).strip()[:_LONGEST]

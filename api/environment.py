"""Which LONGLENS_* variables mean something.

Owns: the refusal of those that mean nothing, as an unknown flag or an unknown name in a file is
refused. Does not own: reading the others (config.py, model_folder.py).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from api.config import ENV_PREFIX, ConfigError, ServeConfig

OTHERS = frozenset({"LONGLENS_CACHE"})
"""Read by other modules than config.py."""
# Kubernetes gives every container the addresses of all services in its namespace, under their
# names: https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
_SERVICE_LINK = re.compile(
    r"\w+_SERVICE_(HOST|PORT(_\w+)?)|\w+_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?"
)
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://", re.IGNORECASE)


def check_environment(environment: Mapping[str, str]) -> None:
    """Raises ConfigError naming every variable that nothing reads, with the likely intended one."""
    known = {f"{ENV_PREFIX}{name.upper()}" for name in ServeConfig.model_fields} | OTHERS
    faults = []
    for name, value in sorted(environment.items()):
        plain = name.upper()
        if not plain.startswith(ENV_PREFIX):
            continue
        if plain in known:
            if _SERVICE_LINK.fullmatch(plain) and _SERVICE_ADDRESS.match(value):
                faults.append(
                    f"{name}={value} is what Kubernetes sets for a service named longlens, not a "
                    "port. Set enableServiceLinks: false in the pod, or rename the service."
                )
        elif not _SERVICE_LINK.fullmatch(plain):
            # Without the prefix, which makes all of them look alike.
            names = sorted(one.removeprefix(ENV_PREFIX) for one in known)
            close = difflib.get_close_matches(plain.removeprefix(ENV_PREFIX), names, n=1)
            hint = "`longlens config show` lists all."
            if close:
                hint = f"Did you mean {ENV_PREFIX}{close[0]}?"
            faults.append(f"{name}: there is no such setting. {hint}")
    if faults:
        raise ConfigError("\n".join(faults))

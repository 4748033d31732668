#!/bin/sh
# Check that the machine has the system packages that building, testing or benchmarking needs:
# system_packages.sh run|test|bench. As root on Debian or Ubuntu the script installs missing packages;
# otherwise it prints their names and fails.
set -eu
purpose=${1:-test}
python=${PYTHON:-python3}
missing=""
can_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    echo "Ratekeeper needs Python 3.11 or newer as '$python'; set PYTHON=... to another one." >&2
    exit 1
}
"$python" -c 'import venv, ensurepip' 2>/dev/null || missing="$missing python3-venv"
command -v "${CC:-cc}" >/dev/null || missing="$missing gcc libc6-dev"
"$python" -c 'import os, sys, sysconfig as s
sys.exit(not os.path.exists(os.path.join(s.get_path("include"), "Python.h")))' \
    || missing="$missing python3-dev"
need() { # PROGRAM PACKAGE. Debian's PATH of ordinary users has no servers.
    PATH="$PATH:/usr/sbin:/sbin" command -v "$1" >/dev/null || missing="$missing $2"
}
# The gRPC server is built on libnghttp2. The service alone starts without it, on grpcio.
if [ "$purpose" != run ] || can_install; then
    echo '#include <nghttp2/nghttp2.h>' | "${CC:-cc}" -E -x c - >/dev/null 2>&1 \
        || missing="$missing libnghttp2-dev"
fi
if [ "$purpose" != run ]; then
    # The tests start these servers: tests/redis_servers, tests/postgres_server.py and others.
    need redis-server redis-server
    need redis-sentinel redis-sentinel
    need openssl openssl
    need nginx nginx-light
    need nft nftables
    need promtool prometheus
    need faketime faketime
    need ip iproute2
    need h2load nghttp2-client
    need chromium chromium
    need systemd-analyze systemd
    # Debian installs the programs of the PostgreSQL server in one folder per version.
    command -v initdb >/dev/null || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 \
        || missing="$missing postgresql"
fi
if [ "$purpose" = bench ]; then
    need wrk wrk
fi
[ -n "$missing" ] || exit 0
if can_install; then
    echo "installing:$missing"
    # Debian starts a service when its package is installed. Only the program is needed, so this
    # policy prevents the start. A service that is already running is not affected.
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        trap 'rm -f "$policy"' EXIT
        trap 'exit 1' HUP INT TERM
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod +x "$policy"
    fi
    apt-get update -qq
    # shellcheck disable=SC2086 # a list of package names
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
    for package in $missing; do
        case $package in
            # Do not start the service at boot either.
            redis-* | postgresql) update-rc.d "$package" disable ;;
            nginx-light) update-rc.d nginx disable ;;
            prometheus) update-rc.d prometheus disable ;;
        esac
    done
else
    echo "These system packages are missing; install them, then run make again:$missing" >&2
    exit 1
fi

#!/bin/sh
# Fuzz the C table and the HTTP/2 sessions with libFuzzer, each for a number of seconds (default 60).
# Needs clang, its runtime and libnghttp2: as root on Debian or Ubuntu the script installs them,
# otherwise it prints their packages.
set -eu
seconds=${1:-60}
kernel=src/ratekeeper/decide/kernel
grpc=src/ratekeeper/service/grpc
out=build/fuzz

can_fuzz() {
    printf '#include <nghttp2/nghttp2.h>\n%s\n' \
        'int LLVMFuzzerTestOneInput(const char *d, long n) { return d != 0 && n < 0; }' |
        clang -fsanitize=fuzzer -x c - -lnghttp2 -o /dev/null 2>/dev/null
}

if ! can_fuzz; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "make fuzz needs clang with libFuzzer and libnghttp2" \
            "(Debian 12: clang libclang-rt-14-dev libnghttp2-dev)" >&2
        exit 1
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        clang libclang-rt-14-dev libnghttp2-dev
fi

# fuzz NAME FLAGS FILES...: compile the files, and run the program.
fuzz() {
    name=$1
    shift
    mkdir -p "$out/$name.corpus"
    clang -std=c11 -D_GNU_SOURCE -g -O1 -fsanitize=fuzzer,address,undefined \
        -fno-sanitize-recover=all "$@" -pthread -o "$out/$name"
    "$out/$name" -max_total_time="$seconds" -max_len=4096 -print_final_stats=1 \
        -artifact_prefix="$out/" "$out/$name.corpus"
}

# shellcheck disable=SC2046 # a list of files
fuzz table -I"$kernel" tests/kernel/fuzz_table.c $(ls "$kernel"/*.c | grep -v module.c)
fuzz session -I"$grpc" tests/service/grpc/fuzz_session.c \
    "$grpc/session.c" "$grpc/requests.c" "$grpc/replies.c" -lnghttp2 \
    -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc,--wrap=free \
    -Wl,--wrap=nghttp2_session_server_new2

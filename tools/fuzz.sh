#!/bin/sh
# Fuzz the C table with libFuzzer for a number of seconds (default 60). Needs clang and its runtime:
# as root on Debian or Ubuntu the script installs them, otherwise it prints their packages.
set -eu
seconds=${1:-60}
kernel=src/tollkeeper/decide/kernel
out=build/fuzz

can_fuzz() {
    echo 'int LLVMFuzzerTestOneInput(const char *d, long n) { return d != 0 && n < 0; }' |
        clang -fsanitize=fuzzer -x c - -o /dev/null 2>/dev/null
}

if ! can_fuzz; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "make fuzz needs clang with libFuzzer (Debian 12: clang libclang-rt-14-dev)" >&2
        exit 1
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        clang libclang-rt-14-dev
fi
mkdir -p "$out/corpus"
# shellcheck disable=SC2046 # a list of files
clang -std=c11 -D_GNU_SOURCE -g -O1 -fsanitize=fuzzer,address,undefined \
    -fno-sanitize-recover=all -I"$kernel" tests/kernel/fuzz_table.c \
    $(ls "$kernel"/*.c | grep -v module.c) -pthread -o "$out/fuzz_table"
"$out/fuzz_table" -max_total_time="$seconds" -max_len=4096 -print_final_stats=1 \
    -artifact_prefix="$out/" "$out/corpus"

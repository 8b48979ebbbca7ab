#!/bin/sh
# Limits what this host sends:  throttle.sh INTERFACE MBIT   or removes the limit:  throttle.sh INTERFACE off
# A token bucket at the interface, as in the paper's experiments; what the host receives is not limited. Needs root.
set -eu
usage() {
    echo "throttle.sh: $1; usage: throttle.sh INTERFACE MBIT|off, for example: throttle.sh ens5 800" >&2
    exit 2
}
[ $# -eq 2 ] || usage "needs two arguments"
interface=$1
mbit=$2
[ -e "/sys/class/net/$interface" ] || usage "this host has no interface '$interface'"

if [ "$mbit" = off ]; then
    # The kernel then puts its default queue back. Without a limit there is nothing to remove.
    if tc qdisc show dev "$interface" root | grep -q ' tbf '; then
        tc qdisc del dev "$interface" root
    fi
    exit
fi
case $mbit in
    '' | *[!0-9]* | 0*) usage "'$mbit' is no whole number of Mbit/s" ;;
esac
# The bucket holds 1 ms, but at least one segment of 64 KiB with its headers; the queue 20 ms more.
burst=$((mbit * 125))
[ "$burst" -ge 98304 ] || burst=98304
tc qdisc replace dev "$interface" root tbf rate "${mbit}mbit" burst "$burst" limit $((burst + mbit * 2500))

# Shared by the scripts beside it, which are run with -ex: a step that fails ends the script, and the trace shows which.

# until_true COMMAND...: waits until it succeeds, at most 20 seconds.
until_true() {
  { set +x; } 2>/dev/null
  tries=0
  until "$@" >/dev/null 2>&1; do
    tries=$((tries + 1))
    [ $tries -lt 400 ] || { echo "never true: $*"; exit 1; }
    sleep 0.05
  done
  set -x
}

# Whether a pingpong's server listens (port 18515).
listening() { cat /proc/net/tcp /proc/net/tcp6 | grep -q ':4853 .* 0A '; }

# port DEVICE STATE: whether its port is in this state.
port() { ibv_devinfo -d "$1" | grep -q "PORT_$2"; }

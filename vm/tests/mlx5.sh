# The kernel's mlx5 drivers and libmlx5 run on the stand-in: devices appear, carry data between them, and report what is injected.
. ./lib.sh
inject() { echo "$*" > /sys/kernel/debug/fakehca; }
[ "$(ibv_devinfo | grep -c PORT_ACTIVE)" = 2 ]
ibv_devinfo -d mlx5_0 | grep -q 'link_layer:.*InfiniBand'
lid() { ibv_devinfo -d "$1" | sed -n 's/.*port_lid:[^0-9]*//p'; }
[ "$(lid mlx5_0)" != "$(lid mlx5_1)" ]
ibv_rc_pingpong -d mlx5_0 -n 200 -c -e &
until_true listening
ibv_rc_pingpong -d mlx5_1 -n 200 -c -e 127.0.0.1
wait $!
inject 0 port_down
until_true port mlx5_0 DOWN
port mlx5_1 ACTIVE
inject 0 port_up
until_true port mlx5_0 ACTIVE
# A command that the firmware refuses is told with its syndrome.
echo 1 > /sys/kernel/tracing/events/mlx5/mlx5_cmd/enable
inject 1 cmdfail 0x503 3 0x1234ab
ibv_rc_pingpong -d mlx5_1 -n 1 > /dev/null 2>&1 &
until_true listening
ibv_rc_pingpong -d mlx5_0 -n 1 127.0.0.1 > /dev/null 2>&1 || true
wait $! || true
grep 'INIT2RTR_QP(0x503).*syndrome (0x1234ab)' /sys/kernel/tracing/trace

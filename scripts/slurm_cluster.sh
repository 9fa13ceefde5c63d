#!/usr/bin/env bash
# A real Slurm cluster of virtual nodes on this machine, to try Pekoe on and to test it with: munge, MariaDB, slurmdbd, slurmctld
# and one slurmd per node, each node in its own network, host-name and mount namespace. Needs root (and apt-get for what lacks).
#   scripts/slurm_cluster.sh install       the Debian packages (up does it, too)
#   scripts/slurm_cluster.sh up            starts it; then `. "$(scripts/slurm_cluster.sh env)"` and sbatch, srun, sacct work
#   scripts/slurm_cluster.sh env           prints the file to source
#   scripts/slurm_cluster.sh down          stops what up started, and nothing else
# PEKOE_SLURM_ID     number of the cluster: several can stand side by side           (default 0)
# PEKOE_SLURM_NODES  nodes n1, n2, …                                                 (default 4)
# PEKOE_SLURM_CPUS   CPUs that a node says it has                                    (default 4)
# PEKOE_SLURM_CGROUP 1 = real memory limits, hence OUT_OF_MEMORY states             (default 0)
# Partitions: debug (default), low (preempted by requeue, 20 s of grace), high. A node has gres gpu:h100:2 and npu:ascend910b:2,
# which are device files without a device behind them.
set -euo pipefail

id=${PEKOE_SLURM_ID:-0} nodes=${PEKOE_SLURM_NODES:-4} cpus=${PEKOE_SLURM_CPUS:-4} cgroup=${PEKOE_SLURM_CGROUP:-0}
folder=/tmp/pekoe-slurm-$id
prefix=pk$id
network=10.77.$id
ctl_port=$((16817 + id * 20)) node_port=$((17000 + id * 20)) dbd_port=$((16819 + id * 20)) sql_port=$((13306 + id * 20))
self=$(hostname -s)

fail() { echo "slurm cluster: $*" >&2; exit 1; }

install_packages() {
  local lacking=() package
  for package in slurm-wlm slurmdbd mariadb-server munge iproute2 openmpi-bin libopenmpi3 libpmix-dev; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q "install ok installed" || lacking+=("$package")
  done
  [ ${#lacking[@]} -eq 0 ] && return
  command -v apt-get >/dev/null || fail "${lacking[*]}: not installed, and there is no apt-get here"
  echo "slurm cluster: installing ${lacking[*]}"
  mkdir -p "$folder"
  { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "${lacking[@]}"; } \
    >"$folder/apt.log" 2>&1 || fail "apt-get install failed; see $folder/apt.log"
}

remember() { echo "$1 $2" >>"$folder/pids"; }

# try SECONDS COMMAND…: until it succeeds
try() {
  local end=$((SECONDS + $1))
  shift
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -ge $end ] && return 1
    sleep 0.1
  done
}

start_munge() {
  (umask 077 && head -c 128 /dev/urandom >"$folder/munge/munge.key")
  munged --key-file="$folder/munge/munge.key" --socket="$folder/sockets/munge" --pid-file="$folder/munge/munged.pid" \
    --log-file="$folder/munge/munged.log" --seed-file="$folder/munge/seed" --num-threads=2
  remember munged "$(cat "$folder/munge/munged.pid")"
}

start_database() {
  local sql=(--no-defaults --socket="$folder/sql/socket")
  mariadb-install-db --no-defaults --user=root --datadir="$folder/sql/data" --skip-test-db \
    --auth-root-authentication-method=normal >"$folder/log/mariadb-install.log" 2>&1
  setsid mariadbd "${sql[@]}" --user=root --datadir="$folder/sql/data" --pid-file="$folder/sql/pid" --bind-address=127.0.0.1 \
    --port="$sql_port" --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900 --innodb-flush-log-at-trx-commit=0 \
    --skip-name-resolve >"$folder/log/mariadb.log" 2>&1 &
  remember mariadbd $!
  try 30 mariadb-admin "${sql[@]}" ping || fail "MariaDB did not start; see $folder/log/mariadb.log"
  mariadb "${sql[@]}" -e "create database slurm_acct_db; create user slurm@'127.0.0.1' identified by 'local';
    grant all on slurm_acct_db.* to slurm@'127.0.0.1';"
  (umask 077 && cat >"$folder/etc/slurmdbd.conf") <<END
AuthType=auth/munge
AuthInfo=socket=$folder/sockets/munge
DbdHost=$self
DbdAddr=127.0.0.1
DbdPort=$dbd_port
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$sql_port
StorageUser=slurm
StoragePass=local
StorageLoc=slurm_acct_db
LogFile=$folder/log/slurmdbd.log
PidFile=$folder/slurmdbd.pid
END
  setsid slurmdbd -D >"$folder/log/slurmdbd.out" 2>&1 &
  remember slurmdbd $!
  try 30 bash -c "exec 3<>/dev/tcp/127.0.0.1/$dbd_port" || fail "slurmdbd did not start; see $folder/log/slurmdbd.out"
  timeout 20 sacctmgr -i add cluster "pekoe$id" >"$folder/log/sacctmgr.log" 2>&1 || true
}

make_network() {
  local i
  ip link add "${prefix}br" type bridge
  ip addr replace "$network.254/24" dev "${prefix}br"
  ip link set "${prefix}br" up
  printf '127.0.0.1 localhost\n%s.254 %s\n' "$network" "$self" >"$folder/etc/hosts"
  for i in $(seq "$nodes"); do echo "$network.$i n$i" >>"$folder/etc/hosts"; done
  # nobody listens there: an answer at once, where a name server out of reach would take 10 s
  echo "nameserver 127.0.0.1" >"$folder/etc/resolv.conf"
  for i in $(seq "$nodes"); do
    ip netns add "$prefix-n$i"
    ip link add "${prefix}v$i" type veth peer name eth0 netns "$prefix-n$i"
    ip link set "${prefix}v$i" master "${prefix}br" up
    ip -n "$prefix-n$i" addr add "$network.$i/24" dev eth0
    ip -n "$prefix-n$i" link set eth0 up
    ip -n "$prefix-n$i" link set lo up
    ip -n "$prefix-n$i" route add default via "$network.254"
  done
}

write_configuration() {
  local i g tracking
  if [ "$cgroup" = 1 ]; then
    tracking=$'ProctrackType=proctrack/cgroup\nTaskPlugin=task/cgroup'
    printf '%s\n' CgroupPlugin=autodetect ConstrainCores=no ConstrainDevices=no ConstrainRAMSpace=yes ConstrainSwapSpace=yes \
      AllowedSwapSpace=0 MinRAMSpace=10 >"$folder/etc/cgroup.conf"
  else
    tracking=$'ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none'
  fi
  : >"$folder/etc/gres.conf"
  for i in $(seq "$nodes"); do
    mkdir -p "$folder/dev/n$i" "$folder/spool-n$i" "$folder/tmp-n$i"
    for g in 0 1; do
      mknod "$folder/dev/n$i/nvidia$g" c 1 3
      mknod "$folder/dev/n$i/davinci$g" c 1 3
    done
    echo "NodeName=n$i Name=gpu Type=h100 File=$folder/dev/n$i/nvidia[0-1]" >>"$folder/etc/gres.conf"
    echo "NodeName=n$i Name=npu Type=ascend910b File=$folder/dev/n$i/davinci[0-1]" >>"$folder/etc/gres.conf"
  done
  cat >"$folder/etc/slurm.conf" <<END
ClusterName=pekoe$id
SlurmctldHost=$self($network.254)
SlurmctldPort=$ctl_port
SlurmdPort=$node_port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$folder/sockets/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
TmpFS=$folder/tmp-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=info
SlurmdParameters=config_overrides
$tracking
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=512
MpiDefault=none
GresTypes=gpu,npu
SwitchType=switch/none
ReturnToService=1
SlurmdTimeout=15
SlurmctldTimeout=30
InactiveLimit=0
KillWait=5
MinJobAge=300
MessageTimeout=10
UnkillableStepTimeout=30
OverTimeLimit=0
JobRequeue=1
MaxArraySize=1001
MaxJobCount=10000
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=5,bf_interval=5,batch_sched_delay=0,sched_min_interval=0,bf_resolution=10
PriorityType=priority/multifactor
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$dbd_port
AccountingStoragePass=$folder/sockets/munge
AccountingStorageTRES=gres/gpu,gres/npu
END
  for i in $(seq "$nodes"); do
    echo "NodeName=n$i NodeAddr=$network.$i Port=$node_port CPUs=$cpus RealMemory=8192 Gres=gpu:h100:2,npu:ascend910b:2" \
      "State=UNKNOWN" >>"$folder/etc/slurm.conf"
  done
  cat >>"$folder/etc/slurm.conf" <<'END'
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=10 State=UP PriorityTier=10 PreemptMode=OFF OverSubscribe=NO
PartitionName=low   Nodes=ALL MaxTime=INFINITE DefaultTime=10 State=UP PriorityTier=1  PreemptMode=REQUEUE GraceTime=20
PartitionName=high  Nodes=ALL MaxTime=INFINITE DefaultTime=10 State=UP PriorityTier=100 PreemptMode=OFF
END
  echo "export SLURM_CONF=$folder/etc/slurm.conf" >"$folder/env.sh"
}

start_nodes() {
  local i
  for i in $(seq "$nodes"); do
    setsid nsenter --net="/run/netns/$prefix-n$i" unshare --uts --mount bash -c "
      hostname n$i
      mount --bind '$folder/etc/hosts' /etc/hosts
      mount --bind '$folder/etc/resolv.conf' /etc/resolv.conf
      mount -t tmpfs -o mode=1777 shm-n$i /dev/shm
      exec slurmd -D -N n$i" >"$folder/log/slurmd-n$i.out" 2>&1 &
    remember "slurmd-n$i" $!
  done
}

all_idle() { [ "$(timeout 5 sinfo -h -N -p debug -t idle -o %N | sort -u | wc -l)" = "$nodes" ]; }

up() {
  [ "$(id -u)" = 0 ] || fail "needs root: namespaces, device files and slurmd"
  install_packages
  [ -e "$folder/pids" ] && fail "is up already ($folder/pids); stop it with: $0 down"
  rm -rf "$folder"
  mkdir -p "$folder"/{munge,sockets,log,state,etc,sql}
  chmod 755 "$folder" "$folder/sockets"
  chmod 700 "$folder/munge"
  : >"$folder/pids"
  export SLURM_CONF=$folder/etc/slurm.conf
  start_munge
  make_network
  write_configuration
  start_database
  setsid slurmctld -D >"$folder/log/slurmctld.out" 2>&1 &
  remember slurmctld $!
  start_nodes
  try 60 all_idle || { sinfo -N -l >&2 || true; tail -n 5 "$folder"/log/*.out >&2; fail "nodes are not idle"; }
  echo "slurm cluster: $nodes nodes are idle; now: . $folder/env.sh"
}

# stop PID: at once if it listens, else by force
stop() {
  local pid=$1 signal
  for signal in TERM TERM KILL; do
    kill -0 "$pid" 2>/dev/null || return 0
    kill -"$signal" "$pid" 2>/dev/null || true
    try 4 bash -c "! kill -0 $pid" && return 0
  done
  echo "slurm cluster: pid $pid is still there" >&2
}

no_jobs() { [ -z "$(timeout 5 squeue -h)" ]; }

down() {
  [ -e "$folder/pids" ] || { echo "slurm cluster: is not up"; return; }
  local who name pid i
  export SLURM_CONF=$folder/etc/slurm.conf
  timeout 5 scancel -f --user=root --state=RUNNING,PENDING,SUSPENDED >/dev/null 2>&1 || true
  try 15 no_jobs || { timeout 5 scancel -f --signal=KILL --user=root >/dev/null 2>&1; try 5 no_jobs; } || true
  timeout 5 scontrol shutdown >/dev/null 2>&1 || true
  for who in slurmd- slurmctld slurmdbd mariadbd munged; do
    while read -r name pid; do
      case $name in "$who"*) stop "$pid" ;; esac
    done <"$folder/pids"
  done
  for i in $(seq "$nodes"); do
    ip netns del "$prefix-n$i" 2>/dev/null || true
    # goes with its network by itself, unless a process is left there
    ip link del "${prefix}v$i" 2>/dev/null || true
  done
  ip link del "${prefix}br" 2>/dev/null || true
  rm -f "$folder/pids"
  echo "slurm cluster: is down"
}

case ${1:-} in
  install) install_packages ;;
  up) up ;;
  down) down ;;
  env) echo "$folder/env.sh" ;;
  *) sed -n '2,15s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac

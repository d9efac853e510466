#!/usr/bin/env bash
# A real Slurm cluster on one machine, for trying sbatch scripts and for fault tests: munged, slurmctld and several
# slurmd, each of which acts as one node with emulated GPUs.  It needs no systemd, no cgroups and no database.
#
#   dev-cluster.sh install        install the four packages needed (root, Debian or Ubuntu)
#   dev-cluster.sh up             start the daemons that are not running
#   dev-cluster.sh down           cancel jobs, stop everything this script started, restore /etc/hosts
#   dev-cluster.sh status         print one line per daemon, and sinfo; exit 0 only if all is healthy
#   dev-cluster.sh env            print export lines:  eval "$(slurm/dev-cluster.sh env)"
#   dev-cluster.sh final JOBID [S]  wait at most S seconds (300) until JOBID has ended; print
#                                 "JOBID STATE EXITCODE RESTARTS"; exit 0 only if COMPLETED, 124 if still running
#   dev-cluster.sh node-crash NODE [now]  power loss: SIGSTOP to the node's slurmd, slurmstepds and tasks.  Peers get
#                                 no message; Slurm marks the node DOWN about 25 s later and requeues or fails
#                                 its jobs; "now": mark it DOWN at once
#   dev-cluster.sh node-kill NODE [now]   SIGKILL to the same processes, daemons first; peers see closed connections
#   dev-cluster.sh slurmd-kill NODE       SIGKILL to the slurmd only; its jobs continue
#   dev-cluster.sh node-start NODE        bring the node back after any of these
#
# Environment variables with their defaults; only `up` reads them, except SLURM_DEV_DIR:
#   SLURM_DEV_DIR=/tmp/slurm-dev   folder of all files of the cluster
#   SLURM_DEV_PORT=26817           port of slurmctld; the nodes use the ports after it
#   SLURM_DEV_NODES=4  SLURM_DEV_GPUS=8  SLURM_DEV_GPU_TYPE=h100
#   SLURM_DEV_CPUS=64  SLURM_DEV_MEM_MB=1000000       (declared only: config_overrides)
#   SLURM_DEV_CLUSTER=slurmdev     SLURM_DEV_PARTITION=dev (several, separated by commas, share the nodes)
#   SLURM_DEV_UTS=auto|0           a UTS namespace per node, so that `hostname` prints the node's name
#   SLURM_DEV_HOSTS=auto|0         add the nodes to /etc/hosts (undone by down)
#   SLURM_DEV_SLURMD_TIMEOUT=10    seconds without a reply after which a node is DOWN
#   SLURM_DEV_CRED_EXPIRE=5        seconds; also the delay before a requeued job may start again
#   SLURM_DEV_FIRST_JOBID=1        first job id after each fresh `up`
#   SLURM_DEV_KEEP=0               1: keep the job queue and the ids of the previous `up`
#   SLURM_DEV_EXTRA=FILE           file to append to slurm.conf
set -euo pipefail

: "${SLURM_DEV_DIR:=/tmp/slurm-dev}" "${SLURM_DEV_PORT:=26817}" "${SLURM_DEV_NODES:=4}"
: "${SLURM_DEV_GPUS:=8}" "${SLURM_DEV_GPU_TYPE:=h100}" "${SLURM_DEV_CPUS:=64}" "${SLURM_DEV_MEM_MB:=1000000}"
: "${SLURM_DEV_CLUSTER:=slurmdev}" "${SLURM_DEV_PARTITION:=dev}" "${SLURM_DEV_UTS:=auto}" "${SLURM_DEV_HOSTS:=auto}"
: "${SLURM_DEV_SLURMD_TIMEOUT:=10}" "${SLURM_DEV_CRED_EXPIRE:=5}" "${SLURM_DEV_KEEP:=0}"
: "${SLURM_DEV_FIRST_JOBID:=1}" "${SLURM_DEV_EXTRA:=}"
case $SLURM_DEV_DIR in /*) ;; *) SLURM_DEV_DIR=$PWD/$SLURM_DEV_DIR ;; esac
D=$SLURM_DEV_DIR
PATH=$PATH:/usr/sbin:/sbin
MARK="SLURM_DEV_MARK=$D"                       # in every daemon's environment; identifies our processes
HOSTS_TAG="# dev-cluster $D"
for v in "${!SLURM_@}"; do case $v in SLURM_DEV_*) ;; *) unset "$v" ;; esac; done   # if this script runs inside a job
CONF=$D/etc/slurm.conf
export SLURM_CONF=$CONF
say() { printf 'dev-cluster: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# --- processes, identified by pid, start time (pids are reused) and our mark in the environment -------
ptime() { local s; s=$(cat "/proc/$1/stat" 2>/dev/null) || return 1; s=${s##*) }; set -- $s; echo "${20}"; }
zombie() { local s; s=$(cat "/proc/$1/stat" 2>/dev/null) || return 0; s=${s##*) }; [ "${s%% *}" = Z ]; }
pid_of() {  # NAME -> pid of the running daemon; fails if it does not run
  local p t; [ -s "$D/run/$1.pid" ] && read -r p t < "$D/run/$1.pid" || return 1
  [ "$(ptime "$p" || echo gone)" = "$t" ] && ! zombie "$p" && echo "$p"
}
state_of() {
  local p s; p=$(pid_of "$1") || { echo stopped; return; }
  s=$(cat "/proc/$p/stat" 2>/dev/null) || { echo stopped; return; }
  s=${s##*) }; case $s in T*) echo frozen ;; *) echo running ;; esac
}
spawn() {   # NAME CMD... : start a detached daemon in foreground mode, with its output in the log
  local name=$1 p; shift
  env -C "$D" -i PATH="$PATH" HOME="${HOME:-/}" LANG=C.UTF-8 "$MARK" SLURM_DEV_DAEMON="$name" SLURM_CONF="$CONF" \
    setsid "$@" </dev/null >>"$D/log/$name.out" 2>&1 9>&- &
  p=$!; disown "$p" 2>/dev/null || true
  echo "$p $(ptime "$p" || echo 0)" > "$D/run/$name.pid"
}
stop() {    # NAME [SIGNAL]: end the daemon and wait; SIGKILL after 5 s
  local p i; p=$(pid_of "$1") || { rm -f "$D/run/$1.pid"; return 0; }
  kill -"${2:-TERM}" "$p" 2>/dev/null || true
  for i in $(seq 100); do pid_of "$1" >/dev/null || break; [ "$i" = 50 ] && kill -KILL "$p" 2>/dev/null; sleep 0.1; done
  rm -f "$D/run/$1.pid"
}
with_env() { local f; f=$(grep -slzxF -- "$1" /proc/[0-9]*/environ || true)    # NAME=VALUE [REGEX] -> pids
  [ -z "$f" ] || [ $# = 1 ] || f=$(grep -slzx -- "$2" $f || true)
  for f in $f; do f=${f#/proc/}; echo "${f%/environ}"; done; }
tree() {    # PID... -> these processes and all their descendants
  local p c; for p; do echo "$p"; c=$(cat /proc/"$p"/task/*/children 2>/dev/null || true); [ -z "$c" ] || tree $c; done
}
ours() {    # [NODE] -> our daemons and slurmstepds, then their descendants and detached tasks
  # A slurmstepd overwrites its environment with its title, so it is found by its open log file.
  local m p f; m=$(with_env "$MARK" ${1:+"SLURM_DEV_DAEMON=slurmd-$1"})
  for f in $(find /proc/[0-9]*/fd -lname "$D/log/slurmd-${1:-node*}.log" 2>/dev/null || true); do
    p=${f#/proc/}; p=${p%%/*}
    case $(cat "/proc/$p/comm" 2>/dev/null) in slurmd|slurmstepd) m="$m $p" ;; esac
  done
  for p in $m $(tree $m $(with_env "SLURM_CONF=$CONF" "SLURMD_NODENAME=${1:-.*}")); do
    case " $$ $BASHPID $PPID 1 " in *" $p "*) ;; *) echo "$p" ;; esac
  done | awk '!seen[$0]++'
}
reap() { local p; for p in $(ours "$@"); do kill -"${SIG:-KILL}" "$p" 2>/dev/null || true; done; }

down_now() { [ "$2" != now ] || scontrol update "NodeName=$1" State=DOWN Reason=dev-cluster; }

nodes() { local i; for ((i = 0; i < SLURM_DEV_NODES; i++)); do echo "node$i"; done; }
addr() { echo "127.0.1.$((10 + ${1#node}))"; }
# Address of a node for /etc/hosts: a separate loopback address with UTS namespaces, otherwise this machine's address.
# Otherwise torchrun's c10d rendezvous finds no agent whose hostname matches MASTER_ADDR, and no agent opens the store.
name_addr() {
  if can_uts; then addr "$1"
  else getent ahostsv4 "$(hostname)" | awk 'NR==1{print $1; f=1} END{if(!f) print "127.0.0.1"}'; fi
}
port() { echo $((SLURM_DEV_PORT + 1 + ${1#node})); }

write_conf() {
  local h u i n; h=$(hostname -s 2>/dev/null || hostname); u=$(id -un)
  local last=$((SLURM_DEV_NODES - 1))
  mkdir -p "$D"/{etc,log,run,munge,dev,state,spool}; chmod 755 "$D" "$D"/{etc,run}; chmod 711 "$D/munge"
  for ((i = 0; i < SLURM_DEV_GPUS; i++)); do   # a device node like /dev/null, or a file, of which slurmd only warns
    [ -e "$D/dev/nvidia$i" ] || mknod -m 666 "$D/dev/nvidia$i" c 1 3 2>/dev/null || : > "$D/dev/nvidia$i"
  done
  [ -s "$D/etc/munge.key" ] || { (umask 077; head -c 128 /dev/urandom > "$D/etc/munge.key"); }
  chmod 600 "$D/etc/munge.key"
  {
    cat <<C
# written by dev-cluster.sh; edits are lost
ClusterName=$SLURM_DEV_CLUSTER
SlurmctldHost=$h(127.0.0.1)
SlurmctldPort=$SLURM_DEV_PORT
SlurmUser=$u
SlurmdUser=$u
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job waits (Reason=BeginTime) before it may start; default 120
AuthInfo=socket=$D/munge/munge.socket,cred_expire=$SLURM_DEV_CRED_EXPIRE
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool/%n
SlurmctldPidFile=$D/run/slurmctld.own.pid
SlurmdPidFile=$D/run/slurmd-%n.own.pid
SlurmctldLogFile=$D/log/slurmctld.log
SlurmdLogFile=$D/log/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=info
# no cgroups, no binding, no memory limits
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
PropagateResourceLimits=NONE
MpiDefault=none
MailProg=/bin/true
SwitchType=switch/none
# slurmd uses the declared hardware, even if the machine has less
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
# only the backfill scheduler starts heterogeneous jobs, so it runs every second
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0
# no database: scontrol (MinJobAge) and this text file have the final states of jobs
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$D/log/jobcomp.txt
MinJobAge=86400
MaxJobCount=20000
FirstJobId=$SLURM_DEV_FIRST_JOBID
JobRequeue=1
# short timeouts, for tests
SlurmdTimeout=$SLURM_DEV_SLURMD_TIMEOUT
SlurmctldTimeout=30
MessageTimeout=10
BatchStartTimeout=10
KillWait=5
# more than 60, because the other nodes of a step need 60 s to give up srun's sockets after the batch host has died;
# with less, Slurm drains these nodes ("Kill task failed")
UnkillableStepTimeout=120
InactiveLimit=0
Waittime=0
ReturnToService=2
C
    for n in $(nodes); do
      echo "NodeName=$n NodeHostname=$n NodeAddr=$(addr "$n") Port=$(port "$n")" \
        "CPUs=$SLURM_DEV_CPUS Boards=1 SocketsPerBoard=2 CoresPerSocket=$((SLURM_DEV_CPUS / 2)) ThreadsPerCore=1" \
        "RealMemory=$SLURM_DEV_MEM_MB TmpDisk=1000000 Feature=$SLURM_DEV_GPU_TYPE" \
        "Gres=gpu:$SLURM_DEV_GPU_TYPE:$SLURM_DEV_GPUS State=UNKNOWN"
    done
    local first=YES part
    for part in ${SLURM_DEV_PARTITION//,/ }; do
      echo "PartitionName=$part Nodes=node[0-$last] Default=$first" \
        "MaxTime=INFINITE DefaultTime=60 State=UP OverSubscribe=NO"
      first=NO
    done
    [ -z "$SLURM_DEV_EXTRA" ] || cat "$SLURM_DEV_EXTRA"
  } > "$CONF"
  echo "NodeName=node[0-$last] Name=gpu Type=$SLURM_DEV_GPU_TYPE File=$D/dev/nvidia[0-$((SLURM_DEV_GPUS - 1))]" \
    > "$D/etc/gres.conf"
  echo '# not used' > "$D/etc/cgroup.conf"
}

hosts() { if [ -w /etc/hosts ]; then flock -w 30 7 || true; "$@"; else "$@"; fi 7< /etc/hosts; }   # one cluster at a time
hosts_del() {  # rewrites the file in place, because /etc/hosts is a bind mount in containers
  [ -w /etc/hosts ] && grep -qF -- "$HOSTS_TAG" /etc/hosts || return 0
  local t; t=$(awk -v tag=" $HOSTS_TAG" 'substr($0, length($0) - length(tag) + 1) != tag' /etc/hosts; echo .)
  printf '%s' "${t%.}" | dd of=/etc/hosts conv=notrunc status=none   # never empty, because other processes read it
  truncate -s "$(printf '%s' "${t%.}" | wc -c)" /etc/hosts
}
hosts_add() {
  [ "$SLURM_DEV_HOSTS" = auto ] || return 0
  local n; hosts_del
  [ ! -w /etc/hosts ] || [ -z "$(tail -c 1 /etc/hosts)" ] || echo >> /etc/hosts
  for n in $(nodes); do
    if [ -w /etc/hosts ]; then echo "$(name_addr "$n") $n $HOSTS_TAG" >> /etc/hosts
    else [ "$(getent ahostsv4 "$n" | awk 'NR==1{print $1}')" = "$(name_addr "$n")" ] ||
      say "warning: cannot write /etc/hosts, so the name $n does not resolve (MASTER_ADDR needs it)"; fi
  done
}
can_uts() { [ "$SLURM_DEV_UTS" = auto ] && command -v unshare >/dev/null && unshare --uts true 2>/dev/null; }

start_node() {
  local n=$1; pid_of "slurmd-$n" >/dev/null && return 0
  mkdir -p "$D/spool/$n"
  set -- "$(command -v slurmd)" -D -N "$n" -f "$CONF"
  ! can_uts || set -- unshare --uts -- sh -c 'hostname "$1" && shift && exec "$@"' sh "$n" "$@"
  spawn "slurmd-$n" "$@"
}
wait_for() {  # SECONDS COMMAND...
  local t=$((SECONDS + $1)); shift
  while ! "$@" >/dev/null 2>&1; do [ $SECONDS -le $t ] || return 1; sleep 0.1; done
}
names() { echo munged slurmctld; nodes | sed 's/^/slurmd-/'; }
dead() { local n; for n in $(names); do pid_of "$n" >/dev/null || { echo "$n"; return 0; }; done; return 1; }
ready_or_dead() { nodes_ok || dead; }
nodes_ok() {  # succeeds if all nodes reply and are usable
  local s='$2 ~ /^(idle|mixed|allocated|completing)$/ {print $1}'
  [ "$(timeout 5 sinfo -h -a -N -o '%N %T' | awk "$s" | sort -u | wc -l)" = "$SLURM_DEV_NODES" ]
}
# Not `| grep -q`, which exits at the first match: the writer then dies by SIGPIPE, and the pipe fails.
node_ok() { grep -qxE 'idle|mixed|allocated|completing' <<<"$(timeout 5 sinfo -h -a -N -n "$1" -o %T)"; }
logs() { tail -n 15 "$D"/log/{munged,slurmctld,slurmd-node0}.{out,log} 2>/dev/null >&2 || true; }

up() {
  local c n p any=0
  for c in munged slurmctld slurmd sinfo; do command -v $c >/dev/null || die "$c not found. Fix: $0 install"; done
  mkdir -p "$D"; exec 9> "$D/.lock"; flock -w 60 9 || die "another dev-cluster.sh has locked $D/.lock"
  for n in $(names); do pid_of "$n" >/dev/null && any=1; done
  if [ $any = 0 ]; then   # fresh start
    reap                    # processes of an earlier cluster whose folder was removed
    for ((p = SLURM_DEV_PORT; p <= SLURM_DEV_PORT + SLURM_DEV_NODES; p++)); do
      ! (exec 3<>"/dev/tcp/127.0.0.1/$p") 2>/dev/null || die "port $p is in use. Fix: set SLURM_DEV_PORT"
    done
    [ "$SLURM_DEV_KEEP" = 1 ] || rm -rf "$D"/{state,spool,log}
    rm -rf "$D/run" "$D/munge"
    write_conf
  elif [ ! -s "$CONF" ]; then die "daemons are running, but $CONF is missing. Fix: $0 down, then $0 up"; fi
  hosts hosts_add
  pid_of munged >/dev/null || { rm -f "$D"/munge/munge.socket*
    spawn munged "$(command -v munged)" --foreground --force --num-threads=4 --key-file="$D/etc/munge.key" \
      --socket="$D/munge/munge.socket" --pid-file="$D/munge/munged.pid" --seed-file="$D/munge/seed" \
      --log-file="$D/log/munged.log"; }
  wait_for 10 munge_ok || { logs; die "munged did not start within 10 s"; }
  if ! pid_of slurmctld >/dev/null; then
    if [ $any = 0 ] && [ "$SLURM_DEV_KEEP" != 1 ]; then spawn slurmctld "$(command -v slurmctld)" -D -c -i -f "$CONF"
    else spawn slurmctld "$(command -v slurmctld)" -D -i -f "$CONF"; fi
  fi
  for n in $(nodes); do start_node "$n"; done
  wait_for 60 ready_or_dead || true
  nodes_ok || {
    c=$(dead) && say "$c ended; its log is $D/log/$c.*"
    sinfo -a -N -l >&2 || true; logs; die "the nodes did not become idle within 60 s"
  }
  say "up: $SLURM_DEV_NODES nodes x $SLURM_DEV_GPUS fake $SLURM_DEV_GPU_TYPE; eval \"\$($0 env)\""
}
munge_ok() { munge -n --socket="$D/munge/munge.socket" | unmunge --socket="$D/munge/munge.socket"; }

down() {
  local n s
  mkdir -p "$D"; exec 9> "$D/.lock"; flock -w 60 9 || die "another dev-cluster.sh has locked $D/.lock"
  if pid_of slurmctld >/dev/null && [ "$SLURM_DEV_KEEP" != 1 ]; then
    for s in PENDING RUNNING SUSPENDED; do timeout 5 scancel --state=$s 2>/dev/null || true; done
    wait_for 8 queue_empty || true
  fi
  for n in "$D"/run/slurmd-*.pid; do
    [ -e "$n" ] || continue
    n=${n##*/}; n=${n%.pid}; case $n in *.own) ;; *) stop "$n" ;; esac
  done
  stop slurmctld; stop munged
  reap
  hosts hosts_del
  rm -rf "$D/run" "$D/munge"      # logs, conf and state are kept for inspection until the next `up`
}
queue_empty() { [ -z "$(timeout 5 squeue -h -a -t PD,R,CG,S 2>/dev/null)" ]; }

status() {
  local n p rc=0; for n in $(names); do
    p=$(state_of "$n"); echo "$n $p $(pid_of "$n" || true)"; [ "$p" = running ] || rc=1
  done
  if pid_of slurmctld >/dev/null; then timeout 10 sinfo -a -N -o '%N %T %G %c %m' || rc=1; nodes_ok || rc=1; fi
  return $rc
}

final() {
  local id=$1 end=$((SECONDS + ${2:-300})) j s
  local ended='COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY|BOOT_FAIL|DEADLINE|PREEMPTED'
  while :; do
    j=$(scontrol -o show job "$id" 2>/dev/null || true)
    [ -n "$j" ] || die "job $id: Slurm does not know this job"
    s=$(grep -oP '(?<= JobState=)\S+' <<<"$j" | sort -u)
    grep -qvxE "$ended" <<<"$s" || break
    [ $SECONDS -lt $end ] || { say "job $id has not ended: $(tr '\n' ' ' <<<"$s")"; return 124; }
    sleep 0.3
  done
  awk '{delete a; for (i=1;i<=NF;i++){k=index($i,"="); if(k) {n=substr($i,1,k-1); if(!(n in a)) a[n]=substr($i,k+1)}}
        id=a["JobId"]; if ("ArrayTaskId" in a) id=a["ArrayJobId"]"_"a["ArrayTaskId"]
        if ("HetJobOffset" in a) id=a["HetJobId"]"+"a["HetJobOffset"]
        print id, a["JobState"], a["ExitCode"], a["Restarts"]}' <<<"$j"
  [ "$s" = COMPLETED ]
}

install() {
  command -v apt-get >/dev/null || die "apt-get not found. Fix: install slurmctld, slurmd, Slurm's commands and munge"
  [ "$(id -u)" = 0 ] || die "install must run as root. Fix: sudo $0 install"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq && apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge
}
usage() { sed -n '2,/^set -/{s/^# \{0,1\}//;/^set -/d;p}' "$0"; }
is_node() { grep -qxF -- "$1" <<<"$(nodes)" || die "node '$1': expected one of $(nodes | paste -sd' ')"; }

if [ -s "$CONF" ] && { [ "${1:-}" != up ] || pid_of slurmctld >/dev/null; }; then
  SLURM_DEV_NODES=$(grep -c '^NodeName=' "$CONF")   # an existing cluster's number of nodes overrides the environment's
fi
case ${1:-} in
  install) install ;;
  up) up ;;
  down) down ;;
  status) status ;;
  env) printf 'export SLURM_CONF=%q SLURM_DEV_DIR=%q\n' "$CONF" "$D" ;;
  final) [ -n "${2:-}" ] || die "usage: $0 final JOBID [SECONDS]"; final "$2" "${3:-}" ;;
  node-crash) is_node "${2:-}"; SIG=STOP reap "$2"; SIG=STOP reap "$2"; down_now "$2" "${3:-}" ;;
  node-kill) is_node "${2:-}"; SIG=STOP reap "$2"; reap "$2"; rm -f "$D/run/slurmd-$2.pid"; down_now "$2" "${3:-}" ;;
  slurmd-kill) is_node "${2:-}"; stop "slurmd-$2" KILL ;;
  node-start) is_node "${2:-}"; n=$2
    [ "$(state_of "slurmd-$n")" != frozen ] || { reap "$n"; rm -f "$D/run/slurmd-$n.pid"; }
    start_node "$n"; wait_for 30 node_ok "$n" || die "$n is not usable after 30 s: $(sinfo -h -N -n "$n" -o '%T %E')" ;;
  -h|--help|help) usage ;;
  *) usage; exit 2 ;;
esac

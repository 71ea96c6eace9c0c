#!/usr/bin/env bash
# Make the work pools that prefect.yaml names, then deploy it to the server that PREFECT_API_URL names.
#   infra/deploy.sh process       pools of processes on the worker's machine
#   infra/deploy.sh kubernetes    pools of Kubernetes jobs, by infra/kubernetes/pool-<name>.json
set -euo pipefail
export PREFECT_DEPLOYMENTS_CLEAR_SCHEDULES_ON_EMPTY=true # `schedules: []` leaves none, instead of what was there
cd "$(dirname "$0")/.."
kind=${1:?process or kubernetes}
: "${PREFECT_API_URL:?names the Prefect server, as in http://prefect:4200/api}"
pools=$(python -c 'import yaml; print(*sorted({d["work_pool"]["name"] for d in yaml.safe_load(open("prefect.yaml"))["deployments"]}))')
for pool in $pools; do
    template=()
    [ "$kind" = kubernetes ] && template=(--base-job-template "infra/kubernetes/pool-$pool.json")
    prefect --no-prompt work-pool create "$pool" --type "$kind" --overwrite "${template[@]}"
done
prefect --no-prompt deploy --all

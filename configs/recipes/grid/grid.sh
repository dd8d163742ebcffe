#!/bin/sh
# Ten runs of one model: five learning rates, two losses. They share the slots of one workspace; those without a slot wait.
#     prl up @ configs/multi_tenant/system.toml
#     configs/recipes/grid/grid.sh --output-dir outputs/multi_tenant
#     prl-tui outputs/multi_tenant
# Its arguments go to `prl runs add`.
set -eu
run=$(dirname "$0")/run.toml
for loss in aipo gspo; do
	for lr in 3e-4 1e-3 2e-3 4e-3 8e-3; do
		prl runs add "$run" --id "run_${loss}_lr$lr" --set "loss.type=$loss" --set "optim.lr=$lr" "$@"
	done
done

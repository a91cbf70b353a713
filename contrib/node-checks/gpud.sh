#!/bin/bash
# Node check that queries GPUd (https://github.com/leptonai/gpud).
# Usage: --node-check 'bash gpud.sh [URL]'
# The node is unfit if a component is unhealthy. A component does not count if GPUd only suggests to ignore
# the problem or to check the program. If GPUd does not answer, the node counts as fit.
curl -sfk --max-time 50 "${1:-https://127.0.0.1:15132}/v1/states" | python3 -c '
import json, sys
harmless = {"IGNORE_NO_ACTION_REQUIRED", "CHECK_USER_APP_AND_GPU"}
for component in json.load(sys.stdin):
    for state in component["states"]:
        actions = (state.get("suggested_actions") or {}).get("repair_actions") or ["none"]
        if state["health"] == "Unhealthy" and not harmless.issuperset(actions):
            print(component["component"], json.dumps(state))
            sys.exit(10)' 2> /dev/null
[ $? != 10 ]

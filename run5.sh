B=/tmp/setup-work/s2/.venv/bin
export TQDM_DISABLE=1
T() { echo "== $1"; shift; /usr/bin/time -f "wall %e user %U sys %S" "$@"; }
rm -rf demo
T make $B/python examples/make_demo_checkpoint.py demo/input --text-bytes $((2<<20))
T tune $B/infinity finetune --model demo/input/checkpoint --data demo/input/text --config examples/demo.yaml \
	    --output demo/output --steps 40 --sequence-length 128 --batch-size 2 --lr 1e-3 --warmup-steps 5 --verify-output --dtype fp32 --keep-store
T check $B/python examples/check_demo.py demo/output demo/swap

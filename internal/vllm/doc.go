// Package vllm finds and runs a real vLLM on a CPU, for a test that evictions free what
// they should in the engine most gateways stand before:
//
//	make e2e-engine
//
// The model has a few layers, random weights, and a token for each byte of ASCII, so
// that it is small, fast, and the size of a prompt is known. Scheduler, paged KV cache,
// server and metrics are vLLM's own.
//
// It takes 3 GB to download, 6 GB of disk, 2 GB of memory and a minute to start, so
// neither go test ./... nor CI has it: the test has the build tag vllm. Without vLLM it
// fails; it never skips. vLLM's wheel for CPUs, and so this package, is for Linux.
package vllm

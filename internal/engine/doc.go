// Package engine is a small inference engine: it serves made-up words with the scheduling, the KV cache and the timing
// of a real one, so that tests can see what an evicted request gives back and when.
//
// [Core] is the scheduler: a deterministic state machine without clock, goroutine, lock or random number. Whoever owns
// it passes the time in and calls [Core.Step] at the end of each step; a simulator does so in virtual time. [Server]
// owns a Core in real time and speaks the OpenAI API and vLLM's metrics:
//
//	s := engine.NewServer(engine.Config{Blocks: 400, MaxSeqs: 8})
//	defer s.Close()
//	http.Serve(listener, s)
//
// # What it models
//
// The scheduler follows vLLM V1 (vllm/v1/core/sched/scheduler.py): paged KV cache, one token budget a step for decodes
// and chunked prefills, first come first served, preemption by recomputation from the tail of the batch, and no
// admission in a step that preempted. As there, the KV of the last token is never stored, a prefill's last chunk yields
// the first token, a request that does not fit the pool is refused, and a block that nobody holds keeps its contents
// until it is taken, so that a prefix can be shared with requests that have ended. The default [Cost] of a step is of
// the order of an 8B model on one H100.
//
// An abort takes effect at a step boundary, never inside a step: measured on vLLM 0.32, a freed slot is usable one or
// two steps after the connection closes, and with one long prefill in flight only after that. [AbortMode] has the
// engines for which this is not so: llama.cpp's server, say, ignores the end of a connection whose answer is not
// streamed.
//
// The server sends status and headers of a streamed answer before the request is admitted, and those of any other answer
// with its end, like vLLM; and like vLLM it leaves the aborted requests out of vllm:request_success_total.
//
// # What it does not model
//
// Tokens and their text mean nothing: a token is four bytes. A prefill that finds no block waits where vLLM would
// preempt it (it is always the last of the batch, so who comes before it wins either way). There is no swapping,
// speculation, LoRA, priority, parallel sampling, or overlap of scheduling and execution; the work on the CPU between
// two steps takes no time; and gauges show the step in flight where vLLM's show the last one.
package engine

package flowcontrol_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/flowcontrol"
)

// An endpoint that runs one request at a time is busy with a batch job; a chat request evicts it.
func ExamplePool() {
	decided := make(chan flowcontrol.Decision, 1)
	pool := flowcontrol.NewPool(evictor.New(),
		flowcontrol.WithEvictionBelow(0),
		flowcontrol.WithObserver(func(d flowcontrol.Decision) { decided <- d }))
	pool.SetEndpoint(flowcontrol.Endpoint{Name: "gpu-0", Capacity: 250_000, Slots: 1})

	// What an ext_proc server gets from extproc.Wrap: contexts that belong to requests.
	job, jobCtx := abort.New(context.Background())
	chat, chatCtx := abort.New(context.Background())
	defer job.Close()
	defer chat.Close()

	lease, err := pool.Admit(jobCtx, flowcontrol.Request{Priority: -1, Tokens: 3000})
	fmt.Println("job runs on", lease.Endpoint(), err)

	pool.Observe("gpu-0", flowcontrol.Sample{Used: 3000, At: time.Now()}) // without evidence nobody is evicted
	lease, err = pool.Admit(chatCtx, flowcontrol.Request{Priority: 1, Tokens: 500, TTFT: time.Second})
	fmt.Println("chat runs on", lease.Endpoint(), err)

	d := <-decided
	fmt.Println(d.Why, len(d.Victims), d.Victims[0].Handle == job.Handle())
	<-jobCtx.Done()
	fmt.Println("job:", context.Cause(jobCtx))
	// Output:
	// job runs on gpu-0 <nil>
	// chat runs on gpu-0 <nil>
	// slot 1 true
	// job: abort: request aborted: preempted
}

func ExamplePool_Admit() {
	pool := flowcontrol.NewPool(evictor.New())
	pool.SetEndpoint(flowcontrol.Endpoint{Name: "gpu-0", Capacity: 250_000})

	_, err := pool.Admit(context.Background(), flowcontrol.Request{Tokens: 300_000})
	if e, ok := errors.AsType[*flowcontrol.OverloadedError](err); ok {
		fmt.Println("429, Retry-After:", e.RetryAfter)
	} else if errors.Is(err, flowcontrol.ErrInfeasible) {
		fmt.Println("413: no endpoint is large enough")
	}
	// Output: 413: no endpoint is large enough
}

// A scheduler with a queue and a gauge of its own asks what to evict when it can't dispatch.
func ExampleReclaimer() {
	ev := evictor.New()
	for range 3 {
		own, ctx := abort.New(context.Background()) // extproc.Wrap does this for each stream
		defer own.Close()
		ev.TrackRequests(ctx, abort.Request{Priority: -1, Tokens: 3000, Endpoint: "gpu-0"})
	}
	reclaimer := flowcontrol.NewReclaimer(ev, flowcontrol.WithEvictionBelow(0), flowcontrol.WithDryRun())

	decision, err := reclaimer.Reclaim(context.Background(), flowcontrol.Pressure{
		Saturation: 0.9, Ceiling: 0.9, Sampled: time.Now(),
		Waiting: []flowcontrol.Waiting{{Priority: 1, Tokens: 2000}},
	})
	fmt.Println(len(decision.Victims), "of", ev.Len(), "would be evicted;", err)
	// Output: 1 of 3 would be evicted; <nil>
}

// What a Pool knows, for metrics.
func ExamplePool_Status() {
	pool := flowcontrol.NewPool(evictor.New(), flowcontrol.WithMaxWaiting(100), flowcontrol.WithCeilings(0.95, 0.8), flowcontrol.WithSteps(16, 8192))
	pool.SetEndpoint(flowcontrol.Endpoint{Name: "gpu-0", Capacity: 250_000})
	lease, err := pool.Admit(context.Background(), flowcontrol.Request{Tokens: 999})
	if err != nil {
		return
	}
	defer lease.Release()
	for _, e := range pool.Status().Endpoints {
		fmt.Println(e.Name, e.Active, "runs,", e.Occupied, "of", e.Capacity, "tokens")
	}
	// Output: gpu-0 1 runs, 1008 of 250000 tokens
}

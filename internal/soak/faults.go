package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
)

// ours is the reason of evictions that are neither drains nor the Pool's.
const ours abort.Reason = "soak"

// faults is what happens to a gateway besides its clients. All of it is done by the goroutine
// that calls run, one thing after the other.
type faults struct {
	gateway *gateway
	account *account
	rnd     *rand.Rand
	rare    []*fault
}

// A fault is something that is done every so often, while there are clients.
type fault struct {
	every, in time.Duration
	do        func(context.Context) error
}

func newFaults(g *gateway, a *account) *faults {
	f := &faults{gateway: g, account: a, rnd: rand.New(rand.NewPCG(a.seed, 1<<32))}
	f.rare = []*fault{
		{3 * time.Second, 800 * time.Millisecond, f.drain},
		{5 * time.Second, 1500 * time.Millisecond, f.restartEngine},
		{7 * time.Second, 2500 * time.Millisecond, f.restartServer},
		{13 * time.Second, 3500 * time.Millisecond, f.restartEnvoy},
	}
	return f
}

// run does harm until ctx is done.
func (f *faults) run(ctx context.Context) error {
	for ctx.Err() == nil {
		before := time.Now()
		sleep(ctx, time.Duration(10+f.rnd.IntN(100))*time.Millisecond)
		if f.rnd.IntN(3) == 0 {
			f.abort()
		} else {
			f.evict(ctx)
		}
		for _, r := range f.rare {
			if r.in -= time.Since(before); r.in <= 0 && ctx.Err() == nil {
				r.in = r.every/2 + time.Duration(f.rnd.Int64N(int64(r.every)))
				if err := r.do(context.WithoutCancel(ctx)); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

var errAborter = errors.New("an Aborter's failure, as planned")

// failingAborter fails at times, or panics, and then its request is spared.
func failingAborter(context.Context, *abort.Handle, abort.Reason) error {
	switch rand.IntN(40) {
	case 0:
		return errAborter
	case 1:
		panic(errAborter)
	}
	return nil
}

// planned reports whether all of an error of Evict's is the Aborter's.
func planned(err error) bool {
	for line := range strings.Lines(err.Error()) {
		if !strings.Contains(line, errAborter.Error()) {
			return false
		}
	}
	return true
}

// evict makes some demand.
func (f *faults) evict(ctx context.Context) {
	d := evictor.Demand{N: 1 + f.rnd.IntN(3), Below: f.rnd.IntN(4), Reason: ours, DryRun: f.rnd.IntN(10) == 0}
	if f.rnd.IntN(3) == 0 {
		d.Endpoint = f.engine().address
	}
	if f.rnd.IntN(4) == 0 {
		d.Tokens = int64(f.rnd.IntN(1500))
	}
	if f.rnd.IntN(5) == 0 {
		d.Before = abort.Streaming
	}
	if f.rnd.IntN(2) == 0 { // else it were always the latest
		d.Spare = func(*abort.Handle) bool { return rand.IntN(2) == 0 }
	}
	f.demand(ctx, d)
}

// demand evicts and checks whom.
func (f *faults) demand(ctx context.Context, d evictor.Demand) {
	victims, err := f.gateway.evictor.Evict(ctx, d)
	if err != nil && !planned(err) && ctx.Err() == nil {
		f.account.violate("Evict(%+v): %v", d, err)
	}
	if d.DryRun {
		return
	}
	if d.N > 0 && len(victims) > d.N {
		f.account.violate("Evict(%+v) ended %d", d, len(victims))
	}
	f.account.chose(d.Reason, victims)
	for _, h := range victims {
		q := h.Requests()
		if len(q) != 1 || q[0].Priority >= d.Below || d.Endpoint != "" && q[0].Endpoint != d.Endpoint {
			f.account.violate("Evict(%+v) ended %+v", d, q)
		}
	}
}

// abort ends some request by its id.
func (f *faults) abort() {
	var ids []string
	for id := range f.gateway.registry.All() {
		ids = append(ids, id)
	}
	if len(ids) > 0 {
		id := ids[f.rnd.IntN(len(ids))]
		f.account.abortedBy(id, f.gateway.registry.Abort(id, abort.Canceled))
	}
}

func (f *faults) engine() *engineServer { return f.gateway.engines[f.rnd.IntN(engines)] }

// drain takes an engine out, ends what runs there, and puts it back.
func (f *faults) drain(ctx context.Context) error {
	f.account.count("drains")
	e := f.engine()
	f.gateway.pool.RemoveEndpoint(e.address)
	f.demand(ctx, evictor.Demand{N: 1000, Below: 1000, Endpoint: e.address, Reason: abort.Draining})
	sleep(ctx, 100*time.Millisecond)
	f.gateway.admitTo(e)
	return nil
}

func (f *faults) restartEngine(ctx context.Context) (err error) {
	e := f.engine()
	f.account.disrupt("an engine", e.address, func() {
		e.stop()
		sleep(ctx, 50*time.Millisecond)
		err = e.start(e.address)
	})
	return err
}

func (f *faults) restartServer(context.Context) (err error) {
	f.account.disrupt("the ext_proc server", "", func() { err = f.gateway.restartServer(f.rnd.IntN(2) == 0) })
	return err
}

func (f *faults) restartEnvoy(ctx context.Context) (err error) {
	f.account.disrupt("Envoy", "", func() { err = f.gateway.restartEnvoy(ctx) })
	return err
}

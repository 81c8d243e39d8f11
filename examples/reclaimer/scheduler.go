package main

import (
	"context"
	"log"
	"slices"
	"sync"
	"time"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/flowcontrol"
)

// scheduler stands for yours: a queue, a gauge, and a loop that dispatches while the gauge is
// below the ceiling.
type scheduler struct {
	ev        *evictor.Evictor
	reclaimer *flowcontrol.Reclaimer
	places    int

	mu     sync.Mutex // guards what follows
	queue  []*waiter
	inside int // streams that were dispatched and have not ended
}

type waiter struct {
	ctx      context.Context
	priority int
	turn     chan struct{} // closed by run
}

func newScheduler(ev *evictor.Evictor, places int, opts ...flowcontrol.Option) *scheduler {
	opts = append(opts, flowcontrol.WithEvictionBelow(0))
	return &scheduler{ev: ev, reclaimer: flowcontrol.NewReclaimer(ev, opts...), places: places}
}

// wait returns when the request of ctx was dispatched, or with the cause of ctx's end.
func (s *scheduler) wait(ctx context.Context, priority int) error {
	w := &waiter{ctx, priority, make(chan struct{})}
	s.mu.Lock()
	i, _ := slices.BinarySearchFunc(s.queue, priority, func(w *waiter, p int) int {
		if w.priority >= p {
			return -1
		}
		return 1
	})
	s.queue = slices.Insert(s.queue, i, w)
	s.mu.Unlock()
	select {
	case <-w.turn:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// run dispatches what waits at each tick. It ends with the ticks.
func (s *scheduler) run(ticks <-chan time.Time) {
	for range ticks {
		for s.dispatch() {
		}
		if p := s.pressure(); len(p.Waiting) > 0 {
			if _, err := s.reclaimer.Reclaim(context.Background(), p); err != nil {
				log.Print(err)
			}
		}
	}
}

// dispatch lets one request go if there is one and the gauge is below the ceiling.
func (s *scheduler) dispatch() bool {
	p := s.pressure()
	if len(p.Waiting) == 0 || s.reclaimer.Estimate(p) >= p.Ceiling {
		return false
	}
	s.mu.Lock()
	w := s.queue[0] // only run takes any out
	s.queue = s.queue[1:]
	s.inside++
	s.mu.Unlock()
	s.ev.TrackRequests(w.ctx, describe(w.priority))
	go func() { // ends with the stream
		<-abort.FromContext(w.ctx).Done()
		s.mu.Lock()
		defer s.mu.Unlock()
		s.inside--
	}()
	close(w.turn)
	return true
}

// pressure is what waits, and what the gauge says. Yours may be a scraped one: then say when.
func (s *scheduler) pressure() flowcontrol.Pressure {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.queue = slices.DeleteFunc(s.queue, func(w *waiter) bool { return w.ctx.Err() != nil })
	p := flowcontrol.Pressure{Saturation: float64(s.inside) / float64(s.places), Ceiling: 0.9, Sampled: time.Now()}
	for _, w := range s.queue {
		p.Waiting = append(p.Waiting, flowcontrol.Waiting{Priority: w.priority})
	}
	return p
}

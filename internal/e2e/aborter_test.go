package e2e_test

import (
	"context"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
)

// An engineAPI is told of an abort, and asks the test what to say.
type engineAPI struct {
	asked  chan *abort.Handle
	answer chan error
}

func (a engineAPI) Abort(_ context.Context, h *abort.Handle, r abort.Reason) error {
	a.asked <- h
	return <-a.answer
}

// TestAborter has an Aborter fail first: the request is spared, and untouched. Then
// it works, and only when it has returned the client's stream is ended.
func TestAborter(t *testing.T) {
	a := engineAPI{make(chan *abort.Handle), make(chan error)}
	w := start(t, setup{mode: duplex, evictor: evictor.New(evictor.WithAborter(a))})
	type result struct {
		victims []*abort.Handle
		err     error
	}
	// during evicts c, calls f while the Aborter runs, and lets that return err.
	during := func(t *testing.T, c *call, err error) (r result) {
		got := make(chan result)
		go func() {
			victims, err := w.evict(c)
			got <- result{victims, err}
		}()
		select {
		case h := <-a.asked:
			if h != c.handle {
				t.Error("the Aborter was asked for another request")
			}
		case r := <-got:
			t.Fatalf("the Aborter was not asked: %+v", r)
		}
		if c.isSet(done) || c.isSet(backendDone) || c.handle.Outcome() != abort.Pending {
			t.Errorf("before the Aborter has returned the request is %v", c.handle.Outcome())
		}
		a.answer <- err
		return <-got
	}
	failed := errors.New("the engine does not answer")
	for _, p := range w.paths {
		for _, then := range []string{"evicted", "finishes"} {
			t.Run(p.name+"/"+then, func(t *testing.T) {
				c := newCall(p, resumes)
				c.enough, c.trailer = len(events(3)), true
				w.start(t.Context(), c)
				c.must(t, hasEnough)

				r := during(t, c, failed)
				if d := cmp.Diff(result{nil, failed}, r, cmp.AllowUnexported(result{}), cmpopts.EquateErrors(), cmpopts.EquateEmpty()); d != "" {
					t.Fatalf("with an Aborter that fails (-want +got):\n%s", d)
				}
				if w.ev.Len() != 1 || c.handle.Outcome() != abort.Pending {
					t.Fatalf("tracked %d, %v", w.ev.Len(), c.handle.Outcome())
				}
				if then == "finishes" {
					close(c.resume)
					c.must(t, done, observed)
					if got := c.client(); got != "whole" || c.event.Outcome != abort.Completed {
						t.Errorf("the spared client got %s, %v", got, c.event.Outcome)
					}
					return
				}
				r = during(t, c, nil)
				if len(r.victims) != 1 || r.victims[0] != c.handle || r.err != nil {
					t.Errorf("evicted %v, %v", r.victims, r.err)
				}
				c.must(t, done, backendDone, observed)
				if got := c.client(); got != "3-events,error,reset" || c.event.Outcome != abort.Aborted {
					t.Errorf("the victim's client got %s, %v", got, c.event.Outcome)
				}
			})
		}
	}
}

package e2e_test

import (
	"context"
	"net/http"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/extevict/extevict/abort"
)

// named returns a call with an x-request-id.
func named(p *path, id string, b backend) *call {
	c := newCall(p, b)
	c.header = http.Header{"X-Request-Id": {id}}
	c.enough = len(events(3))
	return c
}

// TestSameRequestID has two streams carry one x-request-id at the same time: an
// eviction ends the one that was chosen, and only who names the id ends both.
func TestSameRequestID(t *testing.T) {
	w := start(t, setup{mode: streamed})
	const id = "same"
	pair := func(t *testing.T, p *path) (a, b *call) {
		a, b = named(p, id, resumes), named(p, id, resumes)
		for _, c := range []*call{a, b} {
			w.start(t.Context(), c)
			c.must(t, hasEnough)
		}
		if d := cmp.Diff([]*abort.Handle{b.handle, a.handle}, w.registry.Lookup(id), cmp.Comparer(sameHandle)); d != "" {
			t.Fatalf("registered under the id (-want +got):\n%s", d)
		}
		return a, b
	}
	for _, p := range w.paths {
		for _, x := range []string{"older", "newer"} {
			t.Run(p.name+"/"+x, func(t *testing.T) {
				victim, other := pair(t, p)
				if x == "newer" {
					victim, other = other, victim
				}
				if vs, err := w.evict(victim); err != nil || len(vs) != 1 || vs[0] != victim.handle {
					t.Fatalf("evicted %v, %v", vs, err)
				}
				victim.must(t, done, observed)
				if got := victim.client(); got != "3-events,reset" {
					t.Errorf("the victim's client got %s", got)
				}
				if got := other.handle.Outcome(); got != abort.Pending || other.isSet(done) {
					t.Errorf("the other is %v", got)
				}
				if d := cmp.Diff([]*abort.Handle{other.handle}, w.registry.Lookup(id), cmp.Comparer(sameHandle)); d != "" {
					t.Errorf("registered under the id afterwards (-want +got):\n%s", d)
				}
				close(other.resume)
				other.must(t, done, observed)
				if got := other.client(); got != "whole" || other.event.Outcome != abort.Completed {
					t.Errorf("the other's client got %s, %v", got, other.event.Outcome)
				}
			})
		}
		t.Run(p.name+"/both", func(t *testing.T) {
			a, b := pair(t, p)
			if n := w.registry.Abort(id, abort.Canceled); n != 2 {
				t.Errorf("%d aborted, want 2", n)
			}
			for _, c := range []*call{a, b} {
				c.must(t, done, observed)
				l, err := w.line(c)
				if got := c.client(); got != "3-events,reset" || l.Details != "evicted_canceled" {
					t.Errorf("client got %s, access log %+v, %v", got, l, err)
				}
			}
		})
	}
}

func sameHandle(a, b *abort.Handle) bool { return a == b }

// TestRetryBeforeTheEnd has a client leave and come back with the same x-request-id
// before the ext_proc server has noticed: the first is no victim any more, and its end
// does nothing to the second.
func TestRetryBeforeTheEnd(t *testing.T) {
	w := start(t, setup{mode: streamed})
	for _, p := range w.paths {
		t.Run(p.name, func(t *testing.T) {
			const id = "again"
			ctx, leave := context.WithCancel(t.Context())
			first := named(p, id, waits)
			first.hold = requestHeaders
			w.start(ctx, first)
			first.must(t, holding)
			leave()
			if !eventually(func() bool { return first.handle.Outcome() == abort.Closed }) {
				t.Fatal("the first does not end")
			}
			retry := w.start(t.Context(), named(p, id, waits))
			retry.must(t, wrote)

			if vs, err := w.evict(first); len(vs) > 0 || err != nil {
				t.Errorf("evicted %v, %v, although its client had left", vs, err)
			}
			close(first.resume)
			first.must(t, observed)
			if got := retry.handle.Outcome(); got != abort.Pending {
				t.Errorf("the first's end made the second %v", got)
			}
			if n := w.registry.Abort(id, abort.Preempted); n != 1 {
				t.Errorf("%d aborted, want the second", n)
			}
			retry.must(t, done, observed)
			if got := retry.client(); got != "429" {
				t.Errorf("the second's client got %s", got)
			}
		})
	}
}

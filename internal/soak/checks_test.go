package main

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/extproc"
)

// TestSettle books one request and spoils the books.
func TestSettle(t *testing.T) {
	asItIs := func(*account, *request, *stream) {}
	byUs := func(a *account, _ *request, st *stream) { a.chose(ours, []*abort.Handle{st.handle}) }
	for _, c := range []struct {
		name   string
		reason abort.Reason // of its abort, if it is aborted
		end    ending
		books  func(*account, *request, *stream)
		want   string // of the violation
	}{
		{"completed", "", whole, asItIs, ""},
		{"completed, cut", "", reset, asItIs, `the client's end is "reset"`},
		{"completed, cut by a restart", "", reset, func(a *account, _ *request, _ *stream) { a.disrupt("Envoy", "", func() {}) }, ""},
		{"completed, cut, another engine's restart", "", reset, func(a *account, _ *request, _ *stream) { a.disrupt("an engine", "other", func() {}) }, `the client's end is "reset"`},
		{"completed, client left", "", left, asItIs, ""},
		{"completed, chosen", "", whole, func(_ *account, _ *request, st *stream) { st.chosen = []abort.Reason{ours} }, "a victim that was not aborted"},
		{"two events", "", whole, func(_ *account, _ *request, st *stream) { st.events = append(st.events, st.events[0]) }, "not one outcome"},
		{"no event", "", whole, func(_ *account, _ *request, st *stream) { st.events = nil }, "not one outcome"},
		{"two streams", "", whole, func(_ *account, r *request, st *stream) { r.streams = append(r.streams, st) }, "2 streams"},
		{"no stream", "", failed, func(_ *account, r *request, _ *stream) { r.streams = nil }, "0 streams"},
		{"aborted by nobody", ours, evicted, asItIs, "no victim of ours"},
		{"aborted by us", ours, evicted, byUs, ""},
		{"aborted by us twice", ours, evicted, func(a *account, _ *request, st *stream) { a.chose(ours, []*abort.Handle{st.handle, st.handle}) }, "evicted twice"},
		{"aborted by us, whole", ours, whole, byUs, `the client's end is "whole"`},
		{"drained for another reason", abort.Draining, evicted, byUs, "no victim of ours"},
		{"canceled", abort.Canceled, evicted, func(a *account, r *request, _ *stream) { a.abortedBy(r.id, 1) }, ""},
		{"canceled by nobody", abort.Canceled, evicted, asItIs, "aborted by id without a call"},
		{"canceled by two", abort.Canceled, evicted, func(a *account, r *request, _ *stream) { a.abortedBy(r.id, 2) }, "1 more requests of id"},
		{"preempted", abort.Preempted, evicted, func(_ *account, _ *request, st *stream) { st.decided = true }, ""},
		{"preempted by nobody", abort.Preempted, evicted, asItIs, "no victim of the Pool's"},
		{"unknown reason", "other", evicted, asItIs, "a reason that nobody gave"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out strings.Builder
			a := newAccount(&out, 1)
			own, _ := abort.New(context.Background())
			defer own.Close()
			r := &request{name: "name", id: "id", mode: modes[0], endpoint: "engine", started: time.Now()}
			a.begin(r)
			st := a.open(own.Handle())
			a.name(st, "name")
			e := extproc.Event{Handle: own.Handle(), Outcome: abort.Completed}
			if c.reason != "" {
				own.Handle().Abort(c.reason)
				e.Outcome, e.Answer = abort.Aborted, extproc.AnswerStatus
			} else {
				own.Settle(abort.Completed)
			}
			a.observe(e)
			r.ended, r.ending, r.reason = time.Now().Add(time.Minute), c.end, string(c.reason)
			c.books(a, r, st)
			a.settle()
			if got := out.String(); (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
				t.Errorf("violations %q, want %q", got, c.want)
			}
		})
	}
}

package e2e_test

import (
	"context"
	"fmt"
	"io"
	"testing"

	"github.com/extevict/extevict/abort"
)

// TestClientLeaves has clients leave: their requests are Closed, and no victims any
// more.
func TestClientLeaves(t *testing.T) {
	// Status in the access log, phase when it was closed.
	const want = `
		waiting   NONE                  0    unknown
		waiting   STREAMED              0    waiting
		waiting   BUFFERED              0    waiting
		waiting   FULL_DUPLEX_STREAMED  0    waiting
		mid-body  NONE                  200  streaming
		mid-body  STREAMED              200  streaming
		mid-body  BUFFERED              200  held
		mid-body  FULL_DUPLEX_STREAMED  200  streaming
	`
	got := make(map[string][]string) // rows by path
	for _, ph := range phases {
		if ph.name != "waiting" && ph.name != "mid-body" {
			continue
		}
		for _, m := range modes {
			w := start(t, setup{mode: m})
			for _, p := range w.paths {
				c := newCall(p, ph.backend)
				c.enough = len(events(3))
				ctx, leave := context.WithCancel(t.Context())
				w.start(ctx, c)
				c.must(t, ph.reached(m)...)
				leave()
				c.must(t, hungUp, observed, backendDone)

				name := fmt.Sprintf("%s, %v, %s", p.name, m, ph.name)
				if vs, err := w.evict(c); len(vs) > 0 || err != nil || w.ev.Len() > 0 || w.registry.Len() > 0 {
					t.Errorf("%s: evicted %v, %v; tracked %d, registered %d", name, vs, err, w.ev.Len(), w.registry.Len())
				}
				if e := c.event; e.Outcome != abort.Closed || c.handle.Outcome() != abort.Closed || e.Answer != 0 || e.Err != nil {
					t.Errorf("%s: event %+v", name, e)
				}
				// Under load Envoy now and then resets the stream before it half-closes it.
				if c.ended != io.EOF && ending(c.ended) != "canceled" {
					t.Errorf("%s: Recv: %v", name, c.ended)
				}
				l, err := w.line(c)
				if err != nil {
					t.Errorf("%s: %v", name, err)
				}
				details := "downstream_remote_disconnect"
				if p.name == "h2" {
					details = "http2.remote_reset"
				}
				if l.Details != details {
					t.Errorf("%s: details %s, want %s", name, l.Details, details)
				}
				got[p.name] = append(got[p.name], row(ph.name, m, l.Code, c.event.Phase))
			}
		}
	}
	compareRows(t, want, got)
}

// TestUnseenEnd is the end of a response that no message tells the ext_proc server
// of: to the library it is a request that was closed, and no victim. Where the
// message comes, with trailers or without, it is Completed.
func TestUnseenEnd(t *testing.T) {
	// Whether the response has trailers, outcome, what Recv fails with.
	const want = `
		NONE                  false  closed     EOF
		NONE                  true   completed  canceled
		STREAMED              false  completed  canceled
		STREAMED              true   closed     either
		BUFFERED              false  completed  canceled
		BUFFERED              true   closed     canceled
		FULL_DUPLEX_STREAMED  false  completed  canceled
		FULL_DUPLEX_STREAMED  true   completed  canceled
	`
	got := make(map[string][]string) // rows by path
	for _, m := range modes {
		w := start(t, setup{mode: m})
		for _, trailer := range []bool{false, true} {
			for _, p := range w.paths {
				c := newCall(p, resumes)
				c.trailer, c.enough = trailer, len(events(3))
				w.start(t.Context(), c)
				if m == buffered {
					c.must(t, replied(responseHeaders))
				} else {
					c.must(t, hasEnough) // if all comes at once, it is canceled in NONE, too
				}
				close(c.resume)
				c.must(t, done, hungUp, observed)
				name := fmt.Sprintf("%s, %v, trailer %v", p.name, m, trailer)
				if got := c.client(); got != "whole" {
					t.Errorf("%s: client got %s", name, got)
				}
				if vs, err := w.evict(c); len(vs) > 0 || err != nil {
					t.Errorf("%s: evicted %v, %v", name, vs, err)
				}
				end := ending(c.ended)
				if m == streamed && trailer && (end == "canceled" || end == "EOF") {
					end = "either" // canceled by the last chunk's reply if the trailers were there by then
				}
				got[p.name] = append(got[p.name], row(m, trailer, c.event.Outcome, end))
			}
		}
	}
	compareRows(t, want, got)
}

// TestWholeResponse evicts behind the reply to the response headers, when the whole
// response was there before it and the ext_proc server has not looked yet. Envoy has
// not released the headers, since it waits for the reply to the body or the trailers:
// the client gets the status where a reset was foretold.
func TestWholeResponse(t *testing.T) {
	// Whether the response has trailers, what the client gets, the answer as foretold.
	const want = `
		NONE                  true   429  reset
		STREAMED              false  429  reset
		STREAMED              true   429  reset
		BUFFERED              false  429  status
		BUFFERED              true   429  status
		FULL_DUPLEX_STREAMED  false  429  reset
		FULL_DUPLEX_STREAMED  true   429  reset
	`
	got := make(map[string][]string) // rows by path
	for _, m := range modes {
		w := start(t, setup{mode: m})
		for _, trailer := range []bool{false, true} {
			if m == none && !trailer {
				continue // nothing is asked for, and the end comes at once
			}
			for _, p := range w.paths {
				name := fmt.Sprintf("%s, %v, trailer %v", p.name, m, trailer)
				c := newCall(p, finishes)
				c.trailer, c.hold, c.busy = trailer, responseHeaders, responseHeaders
				w.start(t.Context(), c)
				c.must(t, holding)
				if err := p.passed(c); err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				close(c.resume)
				c.must(t, isBusy)
				if vs, err := w.evict(c); len(vs) != 1 || err != nil {
					t.Errorf("%s: evicted %v, %v", name, vs, err)
				}
				close(c.look)
				c.must(t, done, observed)
				got[p.name] = append(got[p.name], row(m, trailer, c.client(), c.event.Answer))
			}
		}
	}
	compareRows(t, want, got)
}

// TestTooLate is the same where Envoy asks for nothing behind the response headers: it
// has ended the request when it reads the answer. Whether the abort won nobody can
// tell: Envoy ends the stream as it does after an answer that it has heeded.
func TestTooLate(t *testing.T) {
	w := start(t, setup{mode: none})
	for _, p := range w.paths {
		c := newCall(p, finishes)
		c.hold, c.busy = responseHeaders, responseHeaders
		w.start(t.Context(), c)
		c.must(t, holding)
		if err := p.passed(c); err != nil {
			t.Fatalf("%s: %v", p.name, err)
		}
		close(c.resume)
		c.must(t, isBusy)
		vs, err := w.evict(c)
		if err != nil {
			t.Errorf("%s: %v", p.name, err)
		}
		close(c.look)
		c.must(t, done, observed)
		if l, err := w.line(c); c.client() != "whole" || l.Details != "via_upstream" {
			t.Errorf("%s: the client got %s, access log %+v, %v", p.name, c.client(), l, err)
		}
		if want := len(vs) > 0; (c.event.Outcome == abort.Aborted) != want {
			t.Errorf("%s: %v, victims %v", p.name, c.event.Outcome, vs)
		}
	}
}

package e2e_test

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"testing"
	"time"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/internal/envoy"
)

// TestErrorEvent is FULL_DUPLEX_STREAMED with various responses: an error event ends
// an event stream that is between two events, and nothing else.
func TestErrorEvent(t *testing.T) {
	const sse = "text/event-stream"
	header := func(more ...string) http.Header {
		h := http.Header{"Content-Type": {sse}}
		for i := 0; i < len(more); i += 2 {
			h[more[i]] = []string{more[i+1]}
		}
		return h
	}
	w := start(t, setup{mode: duplex})
	for _, x := range []struct {
		name   string
		header http.Header
		sent   string
		event  string
	}{
		{"boundary", header(), event(0) + event(1), errorEvent},
		{"charset", header("Content-Type", sse+"; charset=utf-8"), event(0), errorEvent},
		{"CRLF", header(), "data: 0\r\n\r\n", errorEvent},
		{"inside an event", header(), event(0) + "data: tok", ""},
		{"behind a line", header(), event(0) + "data: token 1\n", ""},
		{"JSON", header("Content-Type", "application/json"), "{}\n\n", ""},
		{"content-length", header("Content-Length", "1000"), event(0), ""},
		{"content-encoding", header("Content-Encoding", "br"), event(0), ""},
	} {
		t.Run(x.name, func(t *testing.T) {
			for _, p := range w.paths {
				w.checkEvent(t, p, x.header, x.sent, x.event)
			}
		})
	}
	for _, custom := range []string{"event: error\ndata: custom\n\n", ""} {
		t.Run(fmt.Sprintf("custom %q", custom), func(t *testing.T) {
			w := start(t, setup{mode: duplex, opts: []extproc.Option{extproc.WithErrorEvent(extproc.ErrorEvent{
				Event: func(*abort.Error, []abort.Request) []byte { return []byte(custom) },
			})}})
			for _, p := range w.paths {
				w.checkEvent(t, p, header(), event(0), custom)
			}
		})
	}
}

// checkEvent evicts a call whose client has got what was sent, and wants to see the
// event behind it, or none.
func (w *world) checkEvent(t *testing.T, p *path, header http.Header, sent, event string) {
	t.Helper()
	c := newCall(p, func(_ *call, rw http.ResponseWriter, r *http.Request) error {
		maps.Copy(rw.Header(), header)
		if err := stream(rw, r, sent); err != nil {
			return err
		}
		<-r.Context().Done()
		return context.Cause(r.Context())
	})
	c.enough = len(sent)
	w.start(t.Context(), c)
	c.must(t, hasEnough)
	if vs, err := w.evict(c); err != nil || len(vs) != 1 {
		t.Fatalf("%s: evicted %v, %v", p.name, vs, err)
	}
	c.must(t, done, backendDone, observed)
	if want := sent + event; c.reply.body != want || !p.reset(c.reply.err) {
		t.Errorf("%s: the client got %q, %v; want %q and a reset", p.name, c.reply.body, c.reply.err, want)
	}
	want := extproc.AnswerReset
	if event != "" {
		want = extproc.AnswerEvent
	}
	if c.event.Answer != want || c.event.Err != nil {
		t.Errorf("%s: answer %v, %v; want %v", p.name, c.event.Answer, c.event.Err, want)
	}
	if l, err := w.line(c); l != (line{c.uri, 200, "evicted_preempted", ""}) {
		t.Errorf("%s: access log %+v, %v", p.name, l, err)
	}
}

// TestCleanEnd ends an event stream with the error event, as if it were complete. The
// access log has a normal end, but for the dynamic metadata.
func TestCleanEnd(t *testing.T) {
	w := start(t, setup{
		mode:   duplex,
		filter: envoy.ExtProc{ReceivingNamespaces: []string{extproc.MetadataNamespace}},
		opts:   []extproc.Option{extproc.WithErrorEvent(extproc.ErrorEvent{CleanEnd: true})},
	})
	for _, p := range w.paths {
		c, victims, err := w.evictIn(p, phase{"", "", "", begins, when(hasEnough)})
		if err != nil || victims != 1 {
			t.Fatalf("%s: %d victims, %v", p.name, victims, err)
		}
		got := row(c.client(), c.upstream(), c.event.Answer, c.event.Effect, ending(c.ended))
		if want := "3-events,error,complete cancelled end ended abort"; got != want {
			t.Errorf("%s: %s, want %s", p.name, got, want)
		}
		if want := (line{c.uri, 200, "via_upstream", "preempted"}); c.logged != want {
			t.Errorf("%s: access log %+v, want %+v", p.name, c.logged, want)
		}
	}
}

// TestStreamedEvent is the error event in STREAMED: it takes the place of a chunk that
// the ext_proc server has not replied to, or of the next that comes in time.
func TestStreamedEvent(t *testing.T) {
	// talks sends what it is told, and something more when the call is resumed.
	talks := func(sent string) backend {
		return func(c *call, rw http.ResponseWriter, r *http.Request) error {
			if err := stream(rw, r, sent); err != nil {
				return err
			}
			select {
			case <-c.resume:
			case <-r.Context().Done():
				return context.Cause(r.Context())
			}
			if err := write(rw, event(9)); err != nil {
				return err
			}
			<-r.Context().Done()
			return context.Cause(r.Context())
		}
	}
	const soon, never = 50 * time.Millisecond, time.Hour
	for _, x := range []struct {
		name   string
		wait   time.Duration
		sent   string
		hold   mark
		busy   mark
		more   bool // while the answer waits
		body   string
		answer extproc.Answer
	}{
		{"owed", 0, event(0), responseBody, "", false, errorEvent, extproc.AnswerEvent},
		{"owed nothing", 0, event(0), "", "", false, event(0), extproc.AnswerReset},
		{"next", never, event(0), "", "", true, event(0) + errorEvent, extproc.AnswerEvent},
		{"nothing in time", soon, event(0), "", "", false, event(0), extproc.AnswerReset},
		{"inside an event", never, "data: tok", "", "", false, "data: tok", extproc.AnswerReset},
		{"next for a busy server", never, event(0), "", responseBody, true, event(0) + errorEvent, extproc.AnswerEvent},
	} {
		t.Run(x.name, func(t *testing.T) {
			for _, adopt := range []adoption{wrapped, ownLoop} {
				w := start(t, setup{mode: streamed, adopt: adopt, opts: []extproc.Option{extproc.WithErrorEvent(extproc.ErrorEvent{Wait: x.wait})}})
				for _, p := range w.paths {
					c := newCall(p, talks(x.sent))
					c.hold, c.busy, c.enough = x.hold, x.busy, len(x.sent)
					w.start(t.Context(), c)
					if x.hold != "" {
						c.must(t, holding)
					} else {
						c.must(t, hasEnough)
						if x.busy != "" {
							c.must(t, isBusy)
						}
					}
					if vs, err := w.evict(c); err != nil || len(vs) != 1 {
						t.Fatalf("%s: evicted %v, %v", p.name, vs, err)
					}
					if x.more {
						close(c.resume)
					}
					c.must(t, done, backendDone)
					if !x.more {
						close(c.resume)
					}
					close(c.look)
					c.must(t, observed)
					if c.reply.body != x.body || !p.reset(c.reply.err) || c.event.Answer != x.answer || c.event.Effect != extproc.EffectEnded || c.event.Err != nil {
						t.Errorf("%s: the client got %q, %v, event %+v; want %q, a reset and %v", p.name, c.reply.body, c.reply.err, c.event, x.body, x.answer)
					}
					if took := c.event.Answered.Sub(c.event.Settled); x.wait == soon && took < soon {
						t.Errorf("%s: answered after %v, want %v", p.name, took, soon)
					}
				}
			}
		})
	}
}

// TestGRPC evicts gRPC requests, on HTTP/2, in the way that their clients understand.
// The fake has no gRPC replies.
func TestGRPC(t *testing.T) {
	for _, m := range []mode{none, duplex} {
		t.Run(m.String(), func(t *testing.T) {
			w := start(t, setup{mode: m})
			h2 := w.paths[1]
			c := newCall(h2, waits)
			c.header = http.Header{"Content-Type": {"application/grpc"}, "Te": {"trailers"}}
			w.start(t.Context(), c)
			c.must(t, wrote)
			w.evict(c)
			c.must(t, done, backendDone, observed)
			r := c.reply
			if r.err != nil || r.status != 200 || r.header.Get("Content-Type") != "application/grpc" ||
				r.header.Get("Grpc-Status") != "8" || r.header.Get("Grpc-Message") != errorObject || r.header.Get("X-Evicted-Reason") != "preempted" || r.body != "" {
				t.Errorf("the client got %+v", r)
			}
			if l, err := w.line(c); l != (line{c.uri, 200, "evicted_preempted", ""}) {
				t.Errorf("access log %+v, %v", l, err)
			}

			c = newCall(h2, begins) // whatever its content type says: no event behind gRPC's frames
			c.header = http.Header{"Content-Type": {"application/grpc"}, "Te": {"trailers"}}
			c.enough = len(events(3))
			w.start(t.Context(), c)
			c.must(t, hasEnough)
			w.evict(c)
			c.must(t, done, backendDone, observed)
			if got := c.client(); got != "3-events,reset" {
				t.Errorf("the client got %s", got)
			}
		})
	}
}

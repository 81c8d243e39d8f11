package e2e_test

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"testing"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/extproc"
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
	if l, err := w.line(c); l != (line{c.uri, 200, "evicted_preempted"}) {
		t.Errorf("%s: access log %+v, %v", p.name, l, err)
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
			if l, err := w.line(c); l != (line{c.uri, 200, "evicted_preempted"}) {
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

package extproc_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	corepb "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typepb "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"github.com/google/go-cmp/cmp"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/extproc"
)

// abortAfter serves msgs in a bubble with a server that answers each, aborts the
// request and returns what followed on the wire, and the observer's event.
func abortAfter(t *testing.T, m mode, reason abort.Reason, msgs []*request, opts ...extproc.Option) (wire []*response, e extproc.Event) {
	t.Helper()
	return abortAfterWith(t, echo(m), reason, msgs, opts...)
}

func abortAfterWith(t *testing.T, next serverFunc, reason abort.Reason, msgs []*request, opts ...extproc.Option) (wire []*response, e extproc.Event) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		handles := make(chan *abort.Handle, 1)
		events := 0
		opts := append([]extproc.Option{extproc.WithObserver(func(o extproc.Event) { e = o; events++ })}, opts...)
		st, wait := start(extproc.Wrap(serverFunc(func(s process) error {
			handles <- handle(s)
			return next(s)
		}), opts...), 100)
		h := <-handles
		h.Describe(abort.Request{ID: "described"})
		for _, r := range msgs {
			st.Push(r)
		}
		synctest.Wait()
		for len(st.Replies()) > 0 {
			<-st.Replies()
		}
		if !h.Abort(reason) {
			t.Errorf("not aborted: %v", h.Outcome())
			st.HangUp()
		}
		wire = envoy(st)
		if err := wait(); err != nil {
			t.Errorf("Process: %v", err)
		}
		synctest.Wait() // for the observer
		if events != 1 {
			t.Errorf("%d events", events)
		}
	})
	return wire, e
}

// last is the ImmediateResponse that ends wire.
func last(t *testing.T, wire []*response) *extprocpb.ImmediateResponse {
	t.Helper()
	if len(wire) == 0 || wire[len(wire)-1].GetImmediateResponse() == nil {
		t.Fatalf("no ImmediateResponse at the end of %v", wire)
	}
	if o := wire[len(wire)-1].GetOverrideMessageTimeout(); o != nil {
		t.Error("override_message_timeout rides on the answer: Envoy would swallow it")
	}
	return wire[len(wire)-1].GetImmediateResponse()
}

func answerHeaders(im *extprocpb.ImmediateResponse) map[string]string {
	m := map[string]string{}
	for _, o := range im.GetHeaders().GetSetHeaders() {
		m[o.GetHeader().GetKey()] = string(o.GetHeader().GetRawValue())
	}
	return m
}

func TestDefaultResponse(t *testing.T) {
	for reason, label := range map[abort.Reason]string{
		abort.Preempted:                          "preempted",
		abort.Draining:                           "draining",
		"":                                       "unspecified",
		"Tenant Quota\r\nset-cookie: x":          "tenant-quota--set-cookie--x",
		`"},"x":{"`:                              "----x----",
		abort.Reason(strings.Repeat("x", 1<<20)): strings.Repeat("x", 64),
		"\xff\xfe\u00e9":                         "----",
	} {
		wire, e := abortAfter(t, streamed, reason, []*request{requestHeaders(streamed)})
		im := last(t, wire)
		if c := im.GetStatus().GetCode(); c != typepb.StatusCode_TooManyRequests {
			t.Errorf("status %v", c)
		}
		want := map[string]string{"content-type": "application/json", "retry-after": "1", "x-evicted-reason": label}
		if d := cmp.Diff(want, answerHeaders(im)); d != "" {
			t.Errorf("headers (-want +got):\n%s", d)
		}
		for _, o := range im.GetHeaders().GetSetHeaders() {
			if o.GetAppendAction() != corepb.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD || o.GetHeader().GetValue() != "" {
				t.Errorf("header %v", o)
			}
		}
		if im.Details != "evicted_"+label || im.GrpcStatus != nil {
			t.Errorf("details %q, grpc_status %v", im.Details, im.GrpcStatus)
		}
		var body struct {
			Error struct{ Message, Type, Code string }
		}
		if err := json.Unmarshal(im.Body, &body); err != nil || len(im.Body) > 4096 || !utf8.Valid(im.Body) {
			t.Errorf("body %q: %v", im.Body, err)
		}
		if body.Error.Type != "rate_limit_error" || body.Error.Code != "request_evicted" || !strings.Contains(body.Error.Message, label) {
			t.Errorf("body %s", im.Body)
		}
		if e.Answer != extproc.AnswerStatus || e.Err != nil || e.Answered.Before(e.Settled) || e.Ended.Before(e.Answered) {
			t.Errorf("event %+v", e)
		}
	}
}

// TestGRPC: a gRPC client gets a status that it understands, others get none.
func TestGRPC(t *testing.T) {
	custom := extproc.WithResponse(func(e *abort.Error, r []abort.Request) *extprocpb.ImmediateResponse { return extproc.Response(e, r) })
	for _, c := range []struct {
		contentType string
		opts        []extproc.Option
		want        uint32
	}{
		{"application/grpc", nil, 8}, {"application/grpc+proto", nil, 8}, {"application/grpc", []extproc.Option{custom}, 8},
		{"application/json", nil, 0}, {"", nil, 0},
	} {
		wire, _ := abortAfter(t, streamed, abort.Preempted, []*request{requestHeaders(streamed, "content-type", c.contentType)}, c.opts...)
		if got := last(t, wire).GetGrpcStatus().GetStatus(); got != c.want {
			t.Errorf("%q: grpc_status %d, want %d", c.contentType, got, c.want)
		}
	}
}

// TestCustomResponse: what Envoy would make something else of falls back to the
// default answer, and the observer hears why.
func TestCustomResponse(t *testing.T) {
	type im = extprocpb.ImmediateResponse
	status := func(code int32) *typepb.HttpStatus { return &typepb.HttpStatus{Code: typepb.StatusCode(code)} }
	with := func(key string, raw, value string) *im {
		return &im{Status: status(503), Details: "own", Headers: &extprocpb.HeaderMutation{SetHeaders: []*corepb.HeaderValueOption{
			{Header: &corepb.HeaderValue{Key: key, RawValue: []byte(raw), Value: value}}}}}
	}
	shared := with("x-own", "1", "")
	for _, c := range []struct {
		name    string
		f       func() *im
		details string // of the answer
		err     string
	}{
		{"as it is", func() *im { return shared }, "own", ""},
		{"400", func() *im { return &im{Status: status(400), Details: "own"} }, "own", ""},
		{"599", func() *im { return &im{Status: status(599), Details: "own"} }, "own", ""},
		{"empty value", func() *im { return with("x-own", "", "") }, "own", ""},
		{"all token characters", func() *im { return with("X-!#$%&'*+-.^_`|~09", "a\tb \xff", "") }, "own", ""},
		{"no details", func() *im { return &im{Status: status(503)} }, "evicted_preempted", ""},
		{"no status", func() *im { return &im{} }, "evicted_preempted", "status 0"},
		{"200", func() *im { return &im{Status: status(200)} }, "evicted_preempted", "status 200"},
		{"399", func() *im { return &im{Status: status(399)} }, "evicted_preempted", "status 399"},
		{"600", func() *im { return &im{Status: status(600)} }, "evicted_preempted", "status 600"},
		{"70000", func() *im { return &im{Status: status(70000)} }, "evicted_preempted", "status 70000"},
		{"nil", func() *im { return nil }, "evicted_preempted", "returned nil"},
		{"panic", func() *im { panic("boom") }, "evicted_preempted", "panicked: boom"},
		{"pseudo-header", func() *im { return with(":status", "200", "") }, "evicted_preempted", `":status"`},
		{"empty name", func() *im { return with("", "x", "") }, "evicted_preempted", `""`},
		{"name with a space", func() *im { return with("x y", "x", "") }, "evicted_preempted", `"x y"`},
		{"name that is not ASCII", func() *im { return with("x\u00e9", "x", "") }, "evicted_preempted", "header name"},
		{"CR LF in a value", func() *im { return with("x-own", "a\r\nb: c", "") }, "evicted_preempted", "x-own"},
		{"NUL in a value", func() *im { return with("x-own", "a\x00", "") }, "evicted_preempted", "x-own"},
		{"value", func() *im { return with("x-own", "", "x") }, "evicted_preempted", "raw_value"},
		{"content-length", func() *im { return with("Content-Length", "1", "") }, "evicted_preempted", "content-length"},
		{"host", func() *im { return with("host", "x", "") }, "evicted_preempted", "host"},
		{"x-envoy", func() *im { return with("x-envoy-upstream", "x", "") }, "evicted_preempted", "x-envoy-upstream"},
		{"nil header", func() *im {
			return &im{Status: status(503), Headers: &extprocpb.HeaderMutation{SetHeaders: []*corepb.HeaderValueOption{nil, {}}}}
		}, "evicted_preempted", "header name"},
		{"does not marshal", func() *im { return &im{Status: status(503), Details: "\xff"} }, "evicted_preempted", "UTF-8"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var got string
			wire, e := abortAfter(t, streamed, abort.Preempted, []*request{requestHeaders(streamed)},
				extproc.WithResponse(func(e *abort.Error, r []abort.Request) *im {
					got = fmt.Sprint(e.Reason, r[0].ID)
					return c.f()
				}))
			if d := last(t, wire).Details; d != c.details {
				t.Errorf("details %q, want %q", d, c.details)
			}
			if c.err == "" && e.Err != nil || c.err != "" && (e.Err == nil || !strings.Contains(e.Err.Error(), c.err)) {
				t.Errorf("event's error %v, want %q", e.Err, c.err)
			}
			if got != "preempteddescribed" {
				t.Errorf("the function got %q", got)
			}
		})
	}
	if shared.GrpcStatus != nil || shared.Details != "own" {
		t.Errorf("the user's message was changed: %v", shared)
	}
	wire, e := abortAfter(t, streamed, abort.Preempted, []*request{requestHeaders(streamed, "content-type", "application/grpc")},
		extproc.WithResponse(func(*abort.Error, []abort.Request) *im {
			return &im{Status: status(503), Details: "own", GrpcStatus: &extprocpb.GrpcStatus{}}
		}))
	if im := last(t, wire); im.Details == "own" || im.GrpcStatus.GetStatus() != 8 || e.Err == nil {
		t.Errorf("grpc_status 0: answer %v, error %v", im, e.Err)
	}
}

// TestAnswers: what the client gets depends on where the response is, and an error
// event is sent only where it can be read.
func TestAnswers(t *testing.T) {
	const sse = "text/event-stream"
	rh := func(kv ...string) *request { return responseHeaders(append([]string{":status", "200"}, kv...)...) }
	upTo := func(m mode, msgs ...*request) []*request { return append([]*request{requestHeaders(m)}, msgs...) }
	override := func(m mode) serverFunc {
		return func(s process) error {
			r, _ := s.Recv()
			o := replyIn(m, r)
			o.ModeOverride = processingMode(m)
			s.Send(o)
			return echo(m)(s)
		}
	}
	mutate := func(mut *extprocpb.HeaderMutation) serverFunc {
		return func(s process) error {
			for {
				r, err := s.Recv()
				if err != nil {
					return nil
				}
				o := replyIn(duplex, r)
				if h := o.GetResponseHeaders(); h != nil {
					h.Response = &extprocpb.CommonResponse{HeaderMutation: mut}
				}
				s.Send(o)
			}
		}
	}
	set := func(k, v string) *extprocpb.HeaderMutation {
		return &extprocpb.HeaderMutation{SetHeaders: []*corepb.HeaderValueOption{{Header: &corepb.HeaderValue{Key: k, RawValue: []byte(v)}}}}
	}
	const (
		status  = extproc.AnswerStatus
		reset   = extproc.AnswerReset
		event   = extproc.AnswerEvent
		unknown = extproc.AnswerUnknown
	)
	a := "data: a\n\n"
	for _, c := range []struct {
		name  string
		next  serverFunc
		msgs  []*request
		want  extproc.Answer
		phase abort.Phase
	}{
		{"nothing came", echo(streamed), nil, status, abort.Waiting},
		{"waiting", echo(streamed), upTo(streamed), status, abort.Waiting},
		{"waiting, duplex", echo(duplex), upTo(duplex), status, abort.Waiting},
		{"blind", echo(none), upTo(none), unknown, abort.Unknown},
		{"blind, headers shown", echo(none), upTo(none, rh("content-type", sse)), reset, abort.Streaming},
		{"held", func(s process) error { s.Recv(); s.Recv(); s.Recv(); return nil }, upTo(streamed, rh()), status, abort.Held},
		{"buffered", echo(buffered), upTo(buffered, rh()), status, abort.Held},
		{"streaming", echo(streamed), upTo(streamed, rh("content-type", sse), responseBody(a, false)), reset, abort.Streaming},
		{"headers not shown", echo(streamed), upTo(streamed, responseBody(a, false)), reset, abort.Streaming},
		{"duplex", echo(duplex), upTo(duplex, rh("content-type", sse), responseBody(a, false)), event, abort.Streaming},
		{"duplex, charset", echo(duplex), upTo(duplex, rh("content-type", "Text/Event-Stream; charset=utf-8"), responseBody(a, false)), event, abort.Streaming},
		{"duplex, no body yet", echo(duplex), upTo(duplex, rh("content-type", sse)), reset, abort.Streaming},
		{"duplex, JSON", echo(duplex), upTo(duplex, rh("content-type", "application/json"), responseBody("{", false)), reset, abort.Streaming},
		{"duplex, no content type", echo(duplex), upTo(duplex, rh("x", "y"), responseBody(a, false)), reset, abort.Streaming},
		{"duplex, length", echo(duplex), upTo(duplex, rh("content-type", sse, "content-length", "99"), responseBody(a, false)), reset, abort.Streaming},
		{"duplex, gzip", echo(duplex), upTo(duplex, rh("content-type", sse, "content-encoding", "gzip"), responseBody(a, false)), reset, abort.Streaming},
		{"duplex, gRPC", echo(duplex), append([]*request{requestHeaders(duplex, "content-type", "application/grpc")}, rh("content-type", sse), responseBody(a, false)), reset, abort.Streaming},
		{"duplex, inside an event", echo(duplex), upTo(duplex, rh("content-type", sse), responseBody(a+"data: b", false)), reset, abort.Streaming},
		{"duplex, after a line", echo(duplex), upTo(duplex, rh("content-type", sse), responseBody(a+"data: b\n", false)), reset, abort.Streaming},
		{"duplex, event in pieces", echo(duplex), upTo(duplex, rh("content-type", sse), responseBody("data: b\n", false), responseBody("", false), responseBody("\n", false)), event, abort.Streaming},
		{"duplex, CR LF in pieces", echo(duplex), upTo(duplex, rh("content-type", sse), responseBody("data: b\r", false), responseBody("\n\r", false), responseBody("\n", false)), event, abort.Streaming},
		{"duplex, one CR LF", echo(duplex), upTo(duplex, rh("content-type", sse), responseBody("data: b\r\n", false)), reset, abort.Streaming},
		{"duplex, CR LF cut", echo(duplex), upTo(duplex, rh("content-type", sse), responseBody("data: b\r\n\r", false)), reset, abort.Streaming},
		{"duplex, CR", echo(duplex), upTo(duplex, rh("content-type", sse), responseBody("data: b\r\r", false)), event, abort.Streaming},
		{"duplex, only an empty line", echo(duplex), upTo(duplex, rh("content-type", sse), responseBody("\n\n", false)), event, abort.Streaming},
		{"duplex, only a newline", echo(duplex), upTo(duplex, rh("content-type", sse), responseBody("\n", false)), reset, abort.Streaming},
		{"duplex by an override", override(duplex), upTo(none, rh("content-type", sse), responseBody(a, false)), reset, abort.Streaming},
		{"streamed by an override", override(streamed), upTo(buffered), unknown, abort.Unknown},
		{"buffered by an override", override(buffered), upTo(streamed, rh("content-type", sse)), reset, abort.Streaming},
		{"type set to JSON", mutate(set("Content-Type", "application/json")), upTo(duplex, rh("content-type", sse), responseBody(a, false)), reset, abort.Streaming},
		{"type set to SSE again", mutate(set("content-type", sse)), upTo(duplex, rh("content-type", sse), responseBody(a, false)), event, abort.Streaming},
		{"type removed", mutate(&extprocpb.HeaderMutation{RemoveHeaders: []string{"Content-Type"}}), upTo(duplex, rh("content-type", sse), responseBody(a, false)), reset, abort.Streaming},
		{"length set", mutate(set("content-length", "9")), upTo(duplex, rh("content-type", sse), responseBody(a, false)), reset, abort.Streaming},
		{"encoding set", mutate(set("content-encoding", "br")), upTo(duplex, rh("content-type", sse), responseBody(a, false)), reset, abort.Streaming},
		{"other header set", mutate(set("x", "y")), upTo(duplex, rh("content-type", sse), responseBody(a, false)), event, abort.Streaming},
	} {
		t.Run(c.name, func(t *testing.T) {
			wire, e := abortAfterWith(t, c.next, abort.Preempted, c.msgs)
			if e.Answer != c.want || e.Phase != c.phase || e.Outcome != abort.Aborted || e.Err != nil {
				t.Errorf("event: %v in phase %v, %v, %v; want %v in phase %v", e.Answer, e.Phase, e.Outcome, e.Err, c.want, c.phase)
			}
			last(t, wire)
			var got []byte
			for _, r := range wire[:len(wire)-1] {
				b := r.GetResponseBody().GetResponse().GetBodyMutation().GetStreamedResponse()
				if b == nil || b.EndOfStream {
					t.Errorf("before the answer: %v", r)
				}
				got = append(got, b.GetBody()...)
			}
			if (len(got) > 0) != (c.want == event) {
				t.Errorf("event %q", got)
			}
			if c.want == event {
				data, ok := bytes.CutPrefix(got, []byte("data: "))
				if !ok || !bytes.HasSuffix(data, []byte("\n\n")) || !json.Valid(data) {
					t.Errorf("event %q", got)
				}
			}
		})
	}
}

// TestErrorEvent: the event is the user's, or none if the user says so or fails.
func TestErrorEvent(t *testing.T) {
	msgs := []*request{requestHeaders(duplex), responseHeaders(), responseBody("data: a\n\n", false)}
	for name, c := range map[string]struct {
		f    func(*abort.Error, []abort.Request) []byte
		want string
	}{
		"own": {func(e *abort.Error, r []abort.Request) []byte {
			return []byte("data: " + string(e.Reason) + r[0].ID + "\n\n")
		}, "data: preempteddescribed\n\n"},
		"none":   {func(*abort.Error, []abort.Request) []byte { return nil }, ""},
		"panics": {func(*abort.Error, []abort.Request) []byte { panic("boom") }, ""},
	} {
		wire, _ := abortAfter(t, duplex, abort.Preempted, msgs, extproc.WithErrorEvent(extproc.ErrorEvent{Event: c.f}))
		last(t, wire)
		got := ""
		for _, r := range wire {
			got += string(r.GetResponseBody().GetResponse().GetBodyMutation().GetStreamedResponse().GetBody())
		}
		if got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// TestObservabilityMode: Envoy does not listen, so there is nothing to abort or to
// track; the server's life goes on.
func TestObservabilityMode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ev evictor.Evictor
		var reg abort.Registry
		var got atomic.Int32
		r := requestHeaders(streamed)
		r.ObservabilityMode = true
		var event extproc.Event
		st, wait := start(extproc.Wrap(serverFunc(func(s process) error {
			for {
				if _, err := s.Recv(); err != nil {
					return nil
				}
				got.Add(1)
				if handle(s).Abort(abort.Preempted) {
					t.Error("aborted")
				}
			}
		}), extproc.WithRegistry(&reg), extproc.WithObserver(func(e extproc.Event) { event = e }),
			extproc.WithTracker(&ev, func(context.Context, *request) (abort.Request, bool) { t.Error("asked"); return abort.Request{}, true })), 1)
		st.Push(r)
		b := responseHeaders()
		b.ObservabilityMode = true
		st.Push(b)
		synctest.Wait()
		if ev.Len()+reg.Len() != 0 || got.Load() != 2 {
			t.Errorf("%d tracked, %d messages", ev.Len()+reg.Len(), got.Load())
		}
		st.HangUp()
		wait()
		synctest.Wait()
		if event.Outcome != abort.Closed {
			t.Errorf("event %+v", event)
		}
	})
}

// TestTrackerAndRegistry: identity is the stream. Requests with one id, an empty one,
// none, or somebody else's are tracked each for itself, with the priority that the
// integrator's function gives, and end each for itself. Invariant 2.
func TestTrackerAndRegistry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ev evictor.Evictor
		var reg abort.Registry
		var ended, evicted atomic.Int32
		observe := func(e extproc.Event) {
			if ended.Add(1); e.Outcome == abort.Aborted {
				evicted.Add(1)
			}
		}
		srv := extproc.Wrap(echo(streamed), extproc.WithRegistry(&reg), extproc.WithObserver(observe),
			extproc.WithTracker(&ev, func(ctx context.Context, r *request) (abort.Request, bool) {
				if abort.FromContext(ctx) == nil {
					t.Error("no handle in the context")
				}
				q := abort.Request{Priority: -1}
				for _, h := range r.GetRequestHeaders().GetHeaders().GetHeaders() {
					switch h.Key {
					case "x-request-id":
						q.ID = string(h.RawValue)
					case "x-skip":
						return q, false
					}
				}
				return q, true
			}))
		open := func(kv ...string) (hangUp func() error) {
			st, wait := start(srv, 100)
			st.Push(requestHeaders(streamed, kv...))
			synctest.Wait()
			return func() error { st.HangUp(); return wait() }
		}
		var ends []func() error
		huge := strings.Repeat("h", 64<<10)
		for range 8 {
			ends = append(ends, open("x-request-id", "same", "x-priority", "1000000"))
		}
		ends = append(ends, open("x-request-id", ""), open(), open("x-request-id", huge), open("x-request-id", "\x00\r\n\"<"), open("x-request-id", "skipped", "x-skip", ""))
		if ev.Len() != 12 || reg.Len() != 13 || len(reg.Lookup("same")) != 8 || len(reg.Lookup(huge)) != 1 {
			t.Errorf("%d tracked, %d registered", ev.Len(), reg.Len())
		}
		ends[0]()
		if ev.Len() != 11 || len(reg.Lookup("same")) != 7 {
			t.Errorf("one ended: %d tracked, %d with its id", ev.Len(), len(reg.Lookup("same")))
		}
		for i := range 11 { // each is a victim once, by itself
			vs, err := ev.Evict(context.Background(), evictor.Demand{N: 1})
			if len(vs) != 1 || err != nil || vs[0].Outcome() != abort.Aborted || ev.Len() != 10-i {
				t.Fatalf("eviction %d: %v, %v", i, vs, err)
			}
		}
		if reg.Len() != 1 || reg.Abort("skipped", abort.Canceled) != 1 {
			t.Errorf("%d registered", reg.Len())
		}
		time.Sleep(time.Second)
		for _, end := range ends[1:] {
			if err := end(); err != nil {
				t.Error(err)
			}
		}
		synctest.Wait()
		if ended.Load() != 13 || evicted.Load() != 12 {
			t.Errorf("%d ended, %d of them evicted", ended.Load(), evicted.Load())
		}
	})
}

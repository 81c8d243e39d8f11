package extproc_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	filterpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/extproc/extproctest"
)

// streamedReply is a reply to a chunk with a body, with none (clear), or as it is.
func streamedReply(mutation string) *response {
	b := &extprocpb.BodyResponse{}
	switch mutation {
	case "":
	case "clear":
		b.Response = &extprocpb.CommonResponse{BodyMutation: &extprocpb.BodyMutation{Mutation: &extprocpb.BodyMutation_ClearBody{ClearBody: true}}}
	case "not clear":
		b.Response = &extprocpb.CommonResponse{BodyMutation: &extprocpb.BodyMutation{Mutation: &extprocpb.BodyMutation_ClearBody{}}}
	default:
		b.Response = &extprocpb.CommonResponse{BodyMutation: &extprocpb.BodyMutation{Mutation: &extprocpb.BodyMutation_Body{Body: []byte(mutation)}}}
	}
	return &response{Response: &extprocpb.ProcessingResponse_ResponseBody{ResponseBody: b}}
}

// TestEventInStreamed: in STREAMED the event takes the place of the oldest chunk that
// is owed a reply, if what was forwarded before ends an event.
func TestEventInStreamed(t *testing.T) {
	many := func(n int, s string) (all []string) {
		for range n {
			all = append(all, s)
		}
		return all
	}
	for _, c := range []struct {
		name    string
		chunks  []string
		replies []string
		want    extproc.Answer
	}{
		{"nothing owed", []string{"data: a\n\n"}, []string{""}, extproc.AnswerReset},
		{"first chunk owed", []string{"data: a\n\n"}, nil, extproc.AnswerEvent},
		{"second owed", []string{"data: a\n\n", "data: b\n\n"}, []string{""}, extproc.AnswerEvent},
		{"second owed, inside an event", []string{"data: a\n", "\ndata: b\n\n"}, []string{""}, extproc.AnswerReset},
		{"event in two chunks", []string{"data: a\n", "\n", "data: b"}, []string{"", ""}, extproc.AnswerEvent},
		{"event in bytes", append(strings.Split("d:a\n\n", ""), "data: b"), many(5, ""), extproc.AnswerEvent},
		{"CR LF in bytes", append(strings.Split("d:a\r\n\r\n", ""), "x"), many(7, ""), extproc.AnswerEvent},
		{"CR LF in bytes, cut", append(strings.Split("d:a\r\n\r", ""), "x"), many(6, ""), extproc.AnswerReset},
		{"inside a character", []string{"data: \xc3", "\xa9\n\n"}, []string{""}, extproc.AnswerReset},
		{"empty chunk forwarded", []string{"data: a\n\n", "", "data: b\n\n"}, []string{"", ""}, extproc.AnswerEvent},
		{"empty chunk inside an event", []string{"data: a", "", "data: b\n\n"}, []string{"", ""}, extproc.AnswerReset},
		{"comment", []string{": keep-alive\n\n", "data: b\n\n"}, []string{""}, extproc.AnswerEvent},
		{"comment line alone", []string{"data: a\n\n: ping\n", "data: b\n\n"}, []string{""}, extproc.AnswerReset},
		{"replaced by an event", []string{"data: a", "data: b\n\n"}, []string{"data: A\n\n"}, extproc.AnswerEvent},
		{"replaced by a piece", []string{"data: a\n\n", "data: b\n\n"}, []string{"data: A"}, extproc.AnswerReset},
		{"cleared at a boundary", []string{"data: a\n\n", "data: b", "c"}, []string{"", "clear"}, extproc.AnswerEvent},
		{"not cleared", []string{"data: a\n\n", "data: b", "c"}, []string{"", "not clear"}, extproc.AnswerReset},
		{"many owed", many(30, "data: a\n\n"), []string{""}, extproc.AnswerEvent},
		{"many owed, then replied to", many(12, "data: a\n\n"), many(4, ""), extproc.AnswerEvent},
		{"too many to remember", many(30, "data: a\n\n"), many(20, ""), extproc.AnswerReset}, // in doubt no event
		{"more replies than chunks", []string{"data: a\n\n"}, many(3, ""), extproc.AnswerReset},
	} {
		t.Run(c.name, func(t *testing.T) {
			msgs := []*request{requestHeaders(streamed), responseHeaders()}
			for _, s := range c.chunks {
				msgs = append(msgs, responseBody(s, false))
			}
			// The replies only begin when all chunks are here.
			var late serverFunc = func(s process) error {
				n := 0
				for {
					r, err := s.Recv()
					if err != nil {
						return nil
					}
					if r.GetResponseBody() == nil {
						s.Send(reply(r))
						continue
					}
					if n++; n == len(c.chunks) {
						for _, m := range c.replies {
							s.Send(streamedReply(m))
						}
					}
				}
			}
			wire, e := abortAfterWith(t, late, abort.Preempted, msgs)
			last(t, wire)
			if e.Answer != c.want || e.Effect != extproc.EffectEnded {
				t.Errorf("answer %v, effect %v, want %v", e.Answer, e.Effect, c.want)
			}
			got := ""
			for _, r := range wire[:len(wire)-1] {
				got += string(r.GetResponseBody().GetResponse().GetBodyMutation().GetBody())
			}
			if want := map[bool]string{true: errorEvent}[c.want == extproc.AnswerEvent]; got != want {
				t.Errorf("sent %q, want %q", got, want)
			}
		})
	}
}

// TestWait: with nothing owed the answer waits for the next chunk as long as it is
// told to, whether the server receives or not.
func TestWait(t *testing.T) {
	const wait = 50 * time.Millisecond
	elsewhere := func(s process) error { // the server does not receive
		for range 3 {
			r, _ := s.Recv()
			s.Send(reply(r))
		}
		time.Sleep(time.Minute)
		return nil
	}
	for _, c := range []struct {
		name  string
		serve func(*extproc.Stream) error
		next  *request // what comes 10 ms after the abort
		want  extproc.Answer
		after time.Duration
	}{
		{"chunk", nil, responseBody("data: b\n\n", false), extproc.AnswerEvent, 10 * time.Millisecond},
		{"last chunk", nil, responseBody("data: b\n\n", true), extproc.AnswerReset, 10 * time.Millisecond},
		{"trailers", nil, responseTrailers(), extproc.AnswerReset, 10 * time.Millisecond},
		{"nothing", nil, nil, extproc.AnswerReset, wait},
		{"not in Recv", func(s *extproc.Stream) error { return elsewhere(s) }, responseBody("data: b\n\n", false), extproc.AnswerEvent, 10 * time.Millisecond},
		{"not in Recv, last chunk", func(s *extproc.Stream) error { return elsewhere(s) }, responseBody("data: b\n\n", true), extproc.AnswerReset, 10 * time.Millisecond},
		{"not in Recv, nothing", func(s *extproc.Stream) error { return elsewhere(s) }, nil, extproc.AnswerReset, wait},
		{"own loop", func(s *extproc.Stream) error { return echoOwn(s) }, responseBody("data: b\n\n", false), extproc.AnswerEvent, 10 * time.Millisecond},
		{"own loop, last chunk", func(s *extproc.Stream) error { return echoOwn(s) }, responseBody("data: b\n\n", true), extproc.AnswerReset, 10 * time.Millisecond},
		{"own loop, nothing", func(s *extproc.Stream) error { return echoOwn(s) }, nil, extproc.AnswerReset, wait},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				handles := make(chan *abort.Handle, 1)
				var e extproc.Event
				serve := c.serve
				if serve == nil {
					serve = func(s *extproc.Stream) error { return echo(streamed)(s) }
				}
				st, done := start(extproc.Handler(func(s *extproc.Stream) error { handles <- handle(s); return serve(s) },
					extproc.WithErrorEvent(extproc.ErrorEvent{Wait: wait}), extproc.WithObserver(func(o extproc.Event) { e = o })), 10)
				h := <-handles
				st.Push(requestHeaders(streamed))
				st.Push(responseHeaders())
				st.Push(responseBody("data: a\n\n", false))
				synctest.Wait()
				h.Abort(abort.Preempted)
				if c.next != nil {
					go func() { time.Sleep(10 * time.Millisecond); st.Push(c.next) }()
				}
				envoy(st)
				done()
				time.Sleep(time.Minute)
				synctest.Wait()
				if e.Answer != c.want || e.Answered.Sub(e.Settled) != c.after {
					t.Errorf("%v after %v, want %v after %v", e.Answer, e.Answered.Sub(e.Settled), c.want, c.after)
				}
			})
		})
	}
}

func echoOwn(s *extproc.Stream) error {
	for {
		r, err := s.RecvOrAbort()
		if err != nil {
			return nil
		}
		s.Send(reply(r))
	}
}

// TestCleanEnd: the event ends the response, nothing follows, and metadata says so.
func TestCleanEnd(t *testing.T) {
	clean := extproc.WithErrorEvent(extproc.ErrorEvent{CleanEnd: true})
	msgs := []*request{requestHeaders(duplex), responseHeaders(), responseBody("data: a\n\n", false)}
	synctest.Test(t, func(t *testing.T) {
		handles := make(chan *abort.Handle, 1)
		var e extproc.Event
		st, done := start(extproc.Wrap(serverFunc(func(s process) error { handles <- handle(s); return echo(duplex)(s) }),
			clean, extproc.WithObserver(func(o extproc.Event) { e = o })), 10)
		for _, m := range msgs {
			st.Push(m)
			<-st.Replies()
		}
		(<-handles).Abort("Tenant Quota")
		r := <-st.Replies()
		b := r.GetResponseBody().GetResponse().GetBodyMutation().GetStreamedResponse()
		if !b.GetEndOfStream() || !strings.HasPrefix(string(b.GetBody()), "data: {") || !strings.HasSuffix(string(b.GetBody()), "}\n\n") {
			t.Errorf("event %v", r)
		}
		want := map[string]any{"extevict": map[string]any{"evicted": "tenant-quota"}}
		if d := cmp.Diff(want, r.GetDynamicMetadata().AsMap()); d != "" {
			t.Errorf("metadata (-want +got):\n%s", d)
		}
		time.Sleep(time.Millisecond)
		st.HangUp()
		if err := done(); err != nil || len(st.Replies()) != 0 {
			t.Errorf("Process: %v, %d messages follow", err, len(st.Replies()))
		}
		synctest.Wait()
		if e.Answer != extproc.AnswerEnd || e.Effect != extproc.EffectEnded {
			t.Errorf("event %+v", e)
		}
	})
	// Where no event can be sent, it is an abort like any other.
	for name, msgs := range map[string][]*request{
		"inside an event": {requestHeaders(duplex), responseHeaders(), responseBody("data: a", false)},
		"streamed":        {requestHeaders(streamed), responseHeaders(), responseBody("data: a\n\n", false)},
	} {
		wire, e := abortAfter(t, msgs[0].ProtocolConfig.ResponseBodyMode, abort.Preempted, msgs, clean)
		if last(t, wire); e.Answer != extproc.AnswerReset {
			t.Errorf("%s: %v", name, e.Answer)
		}
	}
}

// TestKeepalive: Wrap asks for trailers, where it may, and keeps them from the server;
// all other messages pass as they are.
func TestKeepalive(t *testing.T) {
	ask := &filterpb.ProcessingMode{ResponseTrailerMode: filterpb.ProcessingMode_SEND}
	own := &filterpb.ProcessingMode{ResponseHeaderMode: filterpb.ProcessingMode_SEND}
	for _, c := range []struct {
		name              string
		request, response mode
		own               *filterpb.ProcessingMode
		noConfig          bool
		want              *filterpb.ProcessingMode
	}{
		{name: "request only", want: ask},
		{name: "request body too", request: streamed, want: &filterpb.ProcessingMode{RequestBodyMode: streamed, ResponseTrailerMode: ask.ResponseTrailerMode}},
		{name: "duplex request", request: duplex},
		{name: "streamed", response: streamed},
		{name: "buffered", response: buffered},
		{name: "duplex", response: duplex},
		{name: "override of its own", own: own, want: own},
		{name: "mode unknown", noConfig: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				saw, msgMode := 0, false
				handles := make(chan *abort.Handle, 1)
				head := reply(requestHeaders(none))
				head.ModeOverride = c.own
				st, done := start(extproc.Wrap(serverFunc(func(s process) error {
					handles <- handle(s)
					for {
						r, err := s.Recv()
						if err != nil {
							return nil
						}
						saw++
						if r.GetRequestHeaders() != nil {
							if msgMode {
								s.SendMsg(head)
							} else {
								s.Send(head)
							}
							continue
						}
						s.Send(reply(r))
					}
				}), extproc.WithKeepalive()), 10)
				r := requestHeaders(none)
				r.ProtocolConfig.RequestBodyMode, r.ProtocolConfig.ResponseBodyMode = c.request, c.response
				if c.noConfig {
					r.ProtocolConfig = nil
				}
				st.Push(r)
				got := <-st.Replies()
				if d := cmp.Diff(c.want, got.GetModeOverride(), protocmp.Transform()); d != "" {
					t.Errorf("mode_override (-want +got):\n%s", d)
				}
				if d := cmp.Diff(c.own, head.ModeOverride, protocmp.Transform()); d != "" {
					t.Errorf("the server's own message was changed:\n%s", d)
				}
				h := <-handles
				asked := c.want != nil && c.own == nil
				st.Push(responseHeaders()) // where the configuration sends them
				<-st.Replies()
				st.Push(responseTrailers())
				if (<-st.Replies()).GetResponseTrailers() == nil {
					t.Error("response trailers are not answered")
				}
				if o := h.Outcome(); o != abort.Completed {
					t.Errorf("outcome %v", o)
				}
				if want := map[bool]int{true: 2, false: 3}[asked]; saw != want {
					t.Errorf("the server saw %d messages, want %d", saw, want)
				}
				st.HangUp()
				done()
			})
		})
	}
}

// TestKeepaliveBehindEnvoy is a request-only server behind the fake Envoy in each phase,
// with overrides allowed and not.
func TestKeepaliveBehindEnvoy(t *testing.T) {
	for _, allowed := range []bool{true, false} {
		for _, at := range []time.Duration{50 * time.Millisecond, 250 * time.Millisecond} {
			t.Run(fmt.Sprint(allowed, at), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					handles := make(chan *abort.Handle, 1)
					var e extproc.Event
					saw := 0
					proxy := &extproctest.Envoy{
						Server: extproc.Wrap(serverFunc(func(s process) error {
							handles <- handle(s)
							for {
								r, err := s.Recv()
								if err != nil {
									return nil
								}
								saw++
								s.Send(reply(r))
							}
						}), extproc.WithKeepalive(), extproc.WithObserver(func(o extproc.Event) { e = o })),
						Upstream: extproctest.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
							time.Sleep(100 * time.Millisecond)
							for i := range 3 {
								fmt.Fprintln(w, i)
								w.(http.Flusher).Flush()
								time.Sleep(100 * time.Millisecond)
							}
						})),
						Config: &filterpb.ExternalProcessor{AllowModeOverride: allowed, ProcessingMode: &filterpb.ProcessingMode{ResponseHeaderMode: filterpb.ProcessingMode_SKIP}},
					}
					won := false
					time.AfterFunc(at, func() { won = (<-handles).Abort(abort.Preempted) })
					got := fetch(t, proxy, context.Background())
					time.Sleep(time.Minute)
					synctest.Wait()
					if won != allowed || saw != 1 {
						t.Errorf("abort won: %v; the server saw %d messages", won, saw)
					}
					want := fetched{Status: 200, Body: "0\n1\n2\n"}
					obstacle := extproc.ObstacleEarlyEnd
					if allowed {
						obstacle = extproc.ObstacleNone
						if want = (fetched{Status: 200, Body: "0\n1\n", Reset: true}); at < 100*time.Millisecond {
							want = fetched{Status: 429, Body: string(extproc.Response(&abort.Error{Reason: abort.Preempted}, nil).Body)}
						}
					}
					if d := cmp.Diff(want, got); d != "" {
						t.Errorf("(-want +got):\n%s", d)
					}
					if e.Obstacle != obstacle {
						t.Errorf("obstacle %q", e.Obstacle)
					}
				})
			})
		}
	}
}

// TestEffects: what the event says came of an answer.
func TestEffects(t *testing.T) {
	for name, c := range map[string]struct {
		proxy func(*extproctest.Stream)
		want  extproc.Effect
	}{
		"hangs up":       {func(st *extproctest.Stream) { <-st.Replies(); time.Sleep(time.Millisecond); st.HangUp() }, extproc.EffectEnded},
		"hangs up late":  {func(st *extproctest.Stream) { <-st.Replies(); time.Sleep(900 * time.Millisecond); st.HangUp() }, extproc.EffectEnded},
		"half-closes":    {func(st *extproctest.Stream) { <-st.Replies(); st.HalfClose() }, extproc.EffectUnconfirmed},
		"never hangs up": {func(st *extproctest.Stream) { <-st.Replies() }, extproc.EffectUnconfirmed},
		"does not read":  {func(*extproctest.Stream) {}, extproc.EffectUnconfirmed},
		"left before":    {func(st *extproctest.Stream) { st.HangUp() }, extproc.EffectUnconfirmed},
	} {
		for sname, serve := range map[string]func(*extproc.Stream){
			"in Recv":        func(s *extproc.Stream) { s.Recv() },
			"in RecvOrAbort": func(s *extproc.Stream) { s.RecvOrAbort() },
			"returns":        func(s *extproc.Stream) { <-s.Context().Done() },
			"busy":           func(s *extproc.Stream) { time.Sleep(2 * time.Second) },
		} {
			if sname == "in Recv" && (name == "never hangs up" || name == "does not read") {
				continue // the server waits for the proxy
			}
			t.Run(name+"/"+sname, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var e extproc.Event
					handles := make(chan *abort.Handle, 1)
					st, done := start(extproc.Handler(func(s *extproc.Stream) error {
						handles <- handle(s)
						serve(s)
						return nil
					}, extproc.WithObserver(func(o extproc.Event) { e = o })), 0)
					h := <-handles
					synctest.Wait()
					h.Abort(abort.Preempted)
					c.proxy(st)
					done()
					time.Sleep(time.Minute)
					synctest.Wait()
					if e.Effect != c.want || e.Outcome != abort.Aborted {
						t.Errorf("%v, %v, want %v", e.Outcome, e.Effect, c.want)
					}
				})
			})
		}
	}
}

// fetched is what a client got.
type fetched struct {
	Status int
	Body   string
	Reset  bool
}

// fetch gets what proxy answers.
func fetch(t *testing.T, proxy http.RoundTripper, ctx context.Context) (f fetched) {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, "GET", "http://x/", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := proxy.RoundTrip(req)
	if err != nil {
		return fetched{Reset: true}
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return fetched{Status: resp.StatusCode, Body: string(b), Reset: err != nil}
}

// TestUnseen checks in which modes nobody waits for the first chunk of a response.
func TestUnseen(t *testing.T) {
	for m, want := range map[filterpb.ProcessingMode_BodySendMode]bool{none: true, streamed: false, buffered: false, duplex: false} {
		synctest.Test(t, func(t *testing.T) {
			handles := make(chan *abort.Handle, 1)
			st, wait := start(extproc.Handler(func(s *extproc.Stream) error {
				handles <- handle(s)
				for {
					if _, err := s.Recv(); err != nil {
						return err
					}
				}
			}), 10)
			st.Push(requestHeaders(m))
			synctest.Wait()
			if got := (<-handles).Progress().Unseen; got != want {
				t.Errorf("%v: unseen %v, want %v", m, got, want)
			}
			st.HangUp()
			wait()
		})
	}
}

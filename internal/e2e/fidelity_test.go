package e2e_test

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typepb "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/internal/envoy"
)

// conversation names the messages that the ext_proc server got, repeated ones once.
func conversation(seen []mark) string {
	short := map[mark]string{
		requestHeaders: "h", requestBody: "b", requestTrailers: "t", requestEnd: ".",
		responseHeaders: "H", responseBody: "B", responseTrailers: "T", responseEnd: ".",
	}
	var s string
	for i, m := range seen {
		if i == 0 || m != seen[i-1] {
			s += short[m]
		}
	}
	return s
}

// TestConversation is what the ext_proc server is shown of calls that nobody ends:
// headers, body and trailers of the request (hbt) and of the response (HBT), with a
// dot where one says that it is the last.
func TestConversation(t *testing.T) {
	// The request's body, the response.
	const want = `
		NONE                  without  whole    h.H
		NONE                  without  trailer  h.HT.
		NONE                  without  empty    h.H.
		NONE                  with     whole    hH
		NONE                  with     trailer  hHT.
		NONE                  with     empty    hH.
		STREAMED              without  whole    h.HB.
		STREAMED              without  trailer  h.HB
		STREAMED              without  empty    h.H.
		STREAMED              with     whole    hb.HB.
		STREAMED              with     trailer  hb.HB
		STREAMED              with     empty    hb.H.
		BUFFERED              without  whole    h.HB.
		BUFFERED              without  trailer  h.HB
		BUFFERED              without  empty    h.H.
		BUFFERED              with     whole    hb.HB.
		BUFFERED              with     trailer  hb.HB
		BUFFERED              with     empty    hb.H.
		FULL_DUPLEX_STREAMED  without  whole    h.HB.
		FULL_DUPLEX_STREAMED  without  trailer  h.HBT.
		FULL_DUPLEX_STREAMED  without  empty    h.H.
		FULL_DUPLEX_STREAMED  with     whole    hb.HB.
		FULL_DUPLEX_STREAMED  with     trailer  hb.HBT.
		FULL_DUPLEX_STREAMED  with     empty    hb.H.
	`
	got := make(map[string][]string) // rows by path
	for _, m := range modes {
		w := start(t, setup{mode: m})
		for _, body := range []string{"without", "with"} {
			for _, response := range []string{"whole", "trailer", "empty"} {
				for _, p := range w.paths {
					c := newCall(p, finishes)
					c.trailer = response == "trailer"
					if response == "empty" {
						c.backend = func(_ *call, rw http.ResponseWriter, r *http.Request) error {
							io.Copy(io.Discard, r.Body)
							rw.WriteHeader(http.StatusNoContent)
							return nil
						}
					}
					if body == "without" {
						c.body = nil
					}
					w.start(t.Context(), c)
					c.must(t, done, hungUp)
					if c.reply.err != nil {
						t.Errorf("%s: %+v", p.name, c.reply)
					}
					got[p.name] = append(got[p.name], row(m, body, response, conversation(c.seen)))
				}
			}
		}
	}
	compareRows(t, want, got)
}

// TestKeepalive has the library keep the streams of a request-only server: the server
// sees nothing that it would not see without, and the client gets what it would. What
// that does for evictions is in TestConfigurations.
func TestKeepalive(t *testing.T) {
	// Whether the response has trailers, outcome with the library's trailers, what the server sees.
	const want = `
		headers           false  closed     h
		headers           true   completed  h
		body              false  closed     hb.
		body              true   completed  hb.
		response-headers  false  closed     hH
		response-headers  true   completed  hH
	`
	got := make(map[string][]string) // rows by path
	for _, x := range []struct {
		name string
		mode mode
	}{
		{"headers", mode{ResponseHeaders: envoy.Skip}},
		{"body", mode{ResponseHeaders: envoy.Skip, RequestBody: envoy.Streamed}},
		{"response-headers", mode{}},
	} {
		plain := start(t, setup{mode: x.mode})
		kept := start(t, setup{mode: x.mode, filter: envoy.ExtProc{AllowModeOverride: true}, opts: []extproc.Option{extproc.WithKeepalive()}})
		for _, trailer := range []bool{false, true} {
			for i := range plain.paths {
				var seen []string
				for _, w := range []*world{plain, kept} {
					c := newCall(w.paths[i], finishes)
					c.trailer = trailer
					w.start(t.Context(), c)
					c.must(t, done, hungUp, observed)
					if got := c.client(); got != "whole" {
						t.Errorf("%s: client got %s", c.path.name, got)
					}
					seen = append(seen, conversation(c.seen))
					if w == kept {
						got[c.path.name] = append(got[c.path.name], row(x.name, trailer, c.event.Outcome, seen[1]))
					}
				}
				if seen[0] != seen[1] {
					t.Errorf("%s: the server sees %s, and %s without", plain.paths[i].name, seen[1], seen[0])
				}
			}
		}
	}
	compareRows(t, want, got)
}

// outside says in words what the client got and what is in the access log.
func (w *world) outside(c *call) string {
	l, err := w.line(c)
	if err != nil {
		w.Error(err)
	}
	client := c.client()
	if c.reply.status >= 400 && client != "429" {
		client = fmt.Sprintf("%d:%s", c.reply.status, c.reply.body)
	}
	return row(client, fmt.Sprintf("%d_%s", l.Code, l.Details))
}

// quits has the ext_proc server end a call's stream, at a message that it does not reply
// to, and waits until both are over.
func (w *world) quits(t *testing.T, p *path, at mark, quit func(process) error) *call {
	c := newCall(p, func(c *call, rw http.ResponseWriter, r *http.Request) error {
		if err := stream(rw, r, event(0)); err != nil {
			return err
		}
		if !w.mode.buffers() {
			select { // the end must not overtake what Envoy makes of the quit
			case <-c.at(hasEnough):
			case <-r.Context().Done():
			}
		}
		_, err := io.WriteString(rw, event(1)+event(2)+last)
		return err
	})
	c.quitAt, c.quit, c.enough = at, quit, len(event(0))
	w.start(t.Context(), c)
	c.must(t, done, hungUp)
	return c
}

// The ways in which an ext_proc server ends a stream by itself.
var (
	ownAnswer = &response{Response: &extprocpb.ProcessingResponse_ImmediateResponse{ImmediateResponse: &extprocpb.ImmediateResponse{
		Status: &typepb.HttpStatus{Code: typepb.StatusCode_Forbidden}, Body: []byte("no"), Details: "not allowed",
	}}}
	returnsNil   = func(process) error { return nil }
	returnsError = func(process) error { return status.Error(codes.Unavailable, "no endpoints") }
	answers      = func(st process) error { return st.Send(ownAnswer) }
)

// TestServerEnds has the ext_proc server end a stream by itself, at a message that it
// does not reply to. That means the same with the library as without it.
func TestServerEnds(t *testing.T) {
	// How, where, what the client gets, what is in the access log.
	const want = `
		NONE                  nil     request-headers   whole           200_via_upstream
		NONE                  nil     response-headers  whole           200_via_upstream
		NONE                  error   request-headers   500:            500_ext_proc_error_gRPC_error_14{no_endpoints{via_upstream}}
		NONE                  error   response-headers  500:            500_ext_proc_error_gRPC_error_14{no_endpoints{via_upstream}}
		NONE                  answer  request-headers   403:no          403_not_allowed
		NONE                  answer  response-headers  403:no          403_not_allowed
		STREAMED              nil     request-headers   whole           200_via_upstream
		STREAMED              nil     response-headers  whole           200_via_upstream
		STREAMED              nil     response-body     whole           200_via_upstream
		STREAMED              error   request-headers   500:            500_ext_proc_error_gRPC_error_14{no_endpoints{via_upstream}}
		STREAMED              error   response-headers  500:            500_ext_proc_error_gRPC_error_14{no_endpoints{via_upstream}}
		STREAMED              error   response-body     0-events,reset  200_ext_proc_error_gRPC_error_14{no_endpoints{via_upstream}}
		1.39: STREAMED              error   response-body     500:            500_ext_proc_error_gRPC_error_14{no_endpoints{via_upstream}}
		STREAMED              answer  request-headers   403:no          403_not_allowed
		STREAMED              answer  response-headers  403:no          403_not_allowed
		STREAMED              answer  response-body     0-events,reset  200_not_allowed
		1.39: STREAMED              answer  response-body     403:no          403_not_allowed
		BUFFERED              nil     request-headers   whole           200_via_upstream
		BUFFERED              nil     response-headers  whole           200_via_upstream
		BUFFERED              nil     response-body     whole           200_via_upstream
		BUFFERED              error   request-headers   500:            500_ext_proc_error_gRPC_error_14{no_endpoints{via_upstream}}
		BUFFERED              error   response-headers  500:            500_ext_proc_error_gRPC_error_14{no_endpoints{via_upstream}}
		BUFFERED              error   response-body     500:            500_ext_proc_error_gRPC_error_14{no_endpoints{via_upstream}}
		BUFFERED              answer  request-headers   403:no          403_not_allowed
		BUFFERED              answer  response-headers  403:no          403_not_allowed
		BUFFERED              answer  response-body     403:no          403_not_allowed
		FULL_DUPLEX_STREAMED  nil     request-headers   whole           200_via_upstream
		FULL_DUPLEX_STREAMED  error   request-headers   500:            500_ext_proc_error_gRPC_error_14{no_endpoints{via_upstream}}
		FULL_DUPLEX_STREAMED  error   response-headers  500:            500_ext_proc_error_gRPC_error_14{no_endpoints{via_upstream}}
		FULL_DUPLEX_STREAMED  error   response-body     0-events,reset  200_ext_proc_error_gRPC_error_14{no_endpoints{via_upstream}}
		1.39: FULL_DUPLEX_STREAMED  error   response-body     500:            500_ext_proc_error_gRPC_error_14{no_endpoints{via_upstream}}
		FULL_DUPLEX_STREAMED  answer  request-headers   403:no          403_not_allowed
		FULL_DUPLEX_STREAMED  answer  response-headers  403:no          403_not_allowed
		FULL_DUPLEX_STREAMED  answer  response-body     0-events,reset  200_not_allowed
		1.39: FULL_DUPLEX_STREAMED  answer  response-body     403:no          403_not_allowed
	`
	got := make(map[string][]string) // rows by path
	for _, m := range modes {
		for _, library := range []bool{false, true} {
			s := setup{mode: m, wrong: true}
			if !library {
				s.adopt = bare
			}
			w := start(t, s)
			for _, x := range []struct {
				name string
				quit func(process) error
			}{
				{"nil", returnsNil},
				{"error", returnsError},
				{"answer", func(st process) error {
					err := answers(st)
					if abort.FromContext(st.Context()).Abort(abort.Canceled) {
						t.Error("aborted behind the server's own answer")
					}
					return err
				}},
			} {
				for _, at := range []mark{requestHeaders, responseHeaders, responseBody} {
					if at == responseBody && m == none || at != requestHeaders && m == duplex && x.name == "nil" {
						continue // not shown; or lost, and how much of it is luck
					}
					for _, p := range w.paths {
						c := w.quits(t, p, at, x.quit)
						name := p.name
						if library {
							c.must(t, observed)
							want := abort.Closed
							if m == buffered && at == responseBody { // the end is there
								want = abort.Completed
							}
							if vs, err := w.evict(c); len(vs) > 0 || err != nil || c.event.Outcome != want {
								t.Errorf("%s, %v, %s at %s: %v, want %v; evicted %v, %v", name, m, x.name, at, c.event.Outcome, want, vs, err)
							}
						} else {
							name += " without the library"
						}
						got[name] = append(got[name], row(m, x.name, strings.ReplaceAll(string(at), " ", "-"), w.outside(c)))
					}
				}
			}
		}
	}
	compareRows(t, want, got)
}

// TestConfigurations evicts where Envoy is configured so that it has another effect,
// or none.
func TestConfigurations(t *testing.T) {
	// Victims, what the client gets, what is in the access log, answer, effect, obstacle.
	const want = `
		response-side-off              waiting   0  whole           200_via_upstream        none     none   early
		1.36: response-side-off              waiting   1  429             429_evicted_preempted   unknown  ended  no
		response-side-off              mid-body  0  whole           200_via_upstream        none     none   early
		1.36: response-side-off              mid-body  1  3-events,reset  200_evicted_preempted   unknown  ended  no
		response-side-off,keepalive    waiting   1  429             429_evicted_preempted   unknown  ended  no
		response-side-off,keepalive    mid-body  1  3-events,reset  200_evicted_preempted   unknown  ended  no
		response-side-off,no-override  waiting   0  whole           200_via_upstream        none     none   early
		1.36: response-side-off,no-override  waiting   1  429             429_evicted_preempted   unknown  ended  no
		response-side-off,no-override  mid-body  0  whole           200_via_upstream        none     none   early
		1.36: response-side-off,no-override  mid-body  1  3-events,reset  200_evicted_preempted   unknown  ended  no
		no-trailers                    waiting   1  429             429_evicted_preempted   unknown  ended  no
		no-trailers                    mid-body  0  whole           200_via_upstream        none     none   early
		1.36: no-trailers                    mid-body  1  3-events,reset  200_evicted_preempted   reset    ended  no
		no-trailers,keepalive          waiting   1  429             429_evicted_preempted   unknown  ended  no
		no-trailers,keepalive          mid-body  1  3-events,reset  200_evicted_preempted   reset    ended  no
		disabled                       waiting   1  500:            500_unhandled_immediate_response_due_to_config_disabled_it  status   ended  no
		disabled                       mid-body  1  3-events,reset  200_unhandled_immediate_response_due_to_config_disabled_it  reset    ended  no
		disabled,fail-open             waiting   1  whole           200_via_upstream        status   ended  no
		disabled,fail-open             mid-body  1  whole           200_via_upstream        reset    ended  no
		fail-open                      waiting   1  429             429_evicted_preempted   status   ended  no
		fail-open                      mid-body  1  3-events,reset  200_evicted_preempted   reset    ended  no
		observability                  waiting   0  whole           200_via_upstream        none     none   observability
	`
	off, both := mode{ResponseHeaders: envoy.Skip}, []string{"waiting", "mid-body"}
	keepalive := []extproc.Option{extproc.WithKeepalive()}
	obstacles := map[extproc.Obstacle]string{extproc.ObstacleNone: "no", extproc.ObstacleObservability: "observability", extproc.ObstacleEarlyEnd: "early"}
	got := make(map[string][]string) // rows by path
	for _, x := range []struct {
		name   string
		mode   mode
		filter envoy.ExtProc
		opts   []extproc.Option
		closes []string // the phases at which Envoy has closed the stream, since 1.37
		runsOn bool     // the request, when it was evicted
	}{
		{name: "response-side-off", mode: off, closes: both},
		{name: "response-side-off,keepalive", mode: off, filter: envoy.ExtProc{AllowModeOverride: true}, opts: keepalive},
		{name: "response-side-off,no-override", mode: off, opts: keepalive, closes: both},
		{name: "no-trailers", closes: both[1:]},
		{name: "no-trailers,keepalive", filter: envoy.ExtProc{AllowModeOverride: true}, opts: keepalive},
		{name: "disabled", mode: streamed, filter: envoy.ExtProc{DisableImmediateResponse: true}},
		{name: "disabled,fail-open", mode: streamed, filter: envoy.ExtProc{DisableImmediateResponse: true, FailureModeAllow: true}, runsOn: true},
		{name: "fail-open", mode: streamed, filter: envoy.ExtProc{FailureModeAllow: true}},
		{name: "observability", mode: streamed, filter: envoy.ExtProc{ObservabilityMode: true}},
	} {
		w := start(t, setup{mode: x.mode, filter: x.filter, opts: x.opts, wrong: true})
		for _, ph := range []phase{
			{"waiting", "", "", comesLate, when(wrote)},
			{"mid-body", "", "", resumes, when(hasEnough)},
		} {
			if x.filter.ObservabilityMode && ph.name == "mid-body" {
				continue // Envoy keeps each stream for five seconds
			}
			var calls []*call
			var victims []int
			for _, p := range w.paths {
				c := newCall(p, ph.backend)
				c.enough = len(events(3))
				w.start(t.Context(), c)
				c.must(t, ph.reached(x.mode)...)
				if slices.Contains(x.closes, ph.name) && !is(p.envoy, "1.36") {
					c.must(t, observed)
				}
				vs, err := w.evict(c)
				if err != nil {
					t.Error(err)
				}
				if x.runsOn {
					c.must(t, hungUp) // before there is more that the answer could find
				}
				if len(vs) == 0 || x.runsOn {
					close(c.resume)
				}
				calls, victims = append(calls, c), append(victims, len(vs))
			}
			for i, c := range calls {
				c.must(t, done, observed)
				outcome := abort.Closed
				if victims[i] > 0 {
					outcome = abort.Aborted
				}
				e := c.event
				if e.Outcome != outcome {
					t.Errorf("%s, %s, %s: %v, want %v", c.path.name, x.name, ph.name, e.Outcome, outcome)
				}
				got[c.path.name] = append(got[c.path.name], row(x.name, ph.name, victims[i], w.outside(c), e.Answer, e.Effect, obstacles[e.Obstacle]))
			}
		}
	}
	compareRows(t, want, got)
}

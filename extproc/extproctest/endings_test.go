package extproctest_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typepb "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/extevict/extevict/extproc/extproctest"
)

// with returns the configuration for m, changed by f.
func with(m *modes, f func(*config)) *config {
	c := mode(m)
	f(c)
	return c
}

func failOpen(c *config) { c.FailureModeAllow = true }

var (
	str  = &modes{ResponseBodyMode: streamed}
	full = &modes{ResponseBodyMode: duplex, ResponseTrailerMode: send}
)

// TestServerFails: what the client gets when the server ends its stream, panics, or breaks the protocol.
func TestServerFails(t *testing.T) {
	spurious := func(st stream, r *request) (bool, error) { st.Send(answer(r, nil)); return false, nil }
	boom := func(stream, *request) (bool, error) { panic("boom") }
	requestReply := &response{Response: &extprocpb.ProcessingResponse_RequestHeaders{}}
	trailersReply := &response{Response: &extprocpb.ProcessingResponse_ResponseTrailers{}}
	early := &response{Response: &extprocpb.ProcessingResponse_ResponseBody{ResponseBody: &extprocpb.BodyResponse{Response: chunk("x", false)}}}
	const (
		fourteen = "ext_proc_error_gRPC_error_14{no_more{via_upstream}}"
		lost     = "ext_proc_error_gRPC_error_14{upstream_connect_error_or_disconnect/reset_before_headers._reset_reason:_connection_termination{upstream_reset_before_response_started{connection_termination}}}"
		lostMid  = "ext_proc_error_gRPC_error_13{upstream_reset_after_response_started{connection_termination}}"
	)
	// Of three tokens the second, 1, is the one at which something happens in mid body.
	for name, tt := range map[string]struct {
		config *config
		on     func(stream, *request, int) (bool, error)
		want   outcome
	}{
		"nil, held":                {mode(str), at("resH", 0, returns(io.EOF)), outcome{Client: "200 012", Server: "reqH. resH", Log: "200 via_upstream whole", Upstream: "done"}},
		"nil, mid body":            {mode(str), at("resB", 1, returns(io.EOF)), outcome{Client: "200 012", Server: "reqH. resH resB(0) resB(1)", Log: "200 via_upstream whole", Upstream: "done"}},
		"nil, BUFFERED":            {mode(&modes{ResponseBodyMode: buffered}), at("resH", 0, returns(io.EOF)), outcome{Client: "200 012", Server: "reqH. resH", Log: "200 via_upstream whole", Upstream: "done"}},
		"nil, FULL_DUPLEX":         {mode(full), at("resB", 1, returns(io.EOF)), outcome{Client: "200 02", Server: "reqH. resH resB(0) resB(1)", Log: "200 via_upstream whole", Upstream: "done", Faults: 1}},
		"error, first message":     {mode(str), at("reqH", 0, returns(errServer)), outcome{Client: "500 ", Server: "reqH.", Log: "500 " + fourteen + " Unavailable whole"}},
		"error, held":              {mode(str), at("resH", 0, returns(errServer)), outcome{Client: "500 ", Server: "reqH. resH", Log: "500 " + fourteen + " Unavailable whole", Upstream: "canceled"}},
		"error, mid body":          {mode(str), at("resB", 1, returns(errServer)), outcome{Client: "200 0 reset", Server: "reqH. resH resB(0) resB(1)", Log: "200 " + fourteen + " Unavailable cut", Upstream: "canceled"}},
		"no status":                {mode(str), at("resH", 0, returns(errors.New("a b"))), outcome{Client: "500 ", Server: "reqH. resH", Log: "500 ext_proc_error_gRPC_error_2{a_b{via_upstream}} Unknown whole", Upstream: "canceled"}},
		"error, status_on_error":   {with(str, func(c *config) { c.StatusOnError = &typepb.HttpStatus{Code: 502} }), at("reqH", 0, returns(errServer)), outcome{Client: "502 ", Server: "reqH.", Log: "502 " + fourteen + " Unavailable whole"}},
		"error, open":              {with(str, failOpen), at("resB", 1, returns(errServer)), outcome{Client: "200 012", Server: "reqH. resH resB(0) resB(1)", Log: "200 via_upstream Unavailable whole", Upstream: "done"}},
		"error, open, FULL_DUPLEX": {with(full, failOpen), at("resB", 1, returns(errServer)), outcome{Client: "200 0 reset", Server: "reqH. resH resB(0) resB(1)", Log: "200 " + fourteen + " Unavailable cut", Upstream: "canceled"}},
		"open, nothing sent yet":   {with(full, failOpen), at("reqH", 0, returns(errServer)), outcome{Client: "200 012", Server: "reqH.", Log: "200 via_upstream Unavailable whole", Upstream: "done"}},

		"panic, first message": {mode(str), at("reqH", 0, boom), outcome{Client: "500 ", Server: "reqH.", Log: "500 " + lost + " panic boom whole", Faults: 1}},
		"panic, held":          {mode(str), at("resH", 0, boom), outcome{Client: "500 ", Server: "reqH. resH", Log: "500 " + lostMid + " panic boom whole", Upstream: "canceled", Faults: 1}},
		"panic, mid body":      {mode(str), at("resB", 1, boom), outcome{Client: "200 0 reset", Server: "reqH. resH resB(0) resB(1)", Log: "200 " + lostMid + " panic boom cut", Upstream: "canceled", Faults: 1}},
		"panic, open":          {with(str, failOpen), at("resB", 1, boom), outcome{Client: "200 012", Server: "reqH. resH resB(0) resB(1)", Log: "200 via_upstream panic boom whole", Upstream: "done", Faults: 1}},

		"spurious, waiting":  {mode(str), at("reqH", 0, spurious), outcome{Client: "500 ", Server: "reqH. Canceled", Log: "500 spurious_message whole", Upstream: "canceled", Faults: 1}},
		"spurious, held":     {mode(str), at("resH", 0, sends(requestReply)), outcome{Client: "500 ", Server: "reqH. resH Canceled", Log: "500 spurious_message whole", Upstream: "canceled", Faults: 1}},
		"spurious, mid body": {mode(str), at("resB", 1, spurious), outcome{Client: "200 01 reset", Server: "reqH. resH resB(0) resB(1) Canceled", Log: "200 spurious_message cut", Upstream: "canceled", Faults: 1}},
		"spurious, open":     {with(str, failOpen), at("resB", 1, spurious), outcome{Client: "200 012", Server: "reqH. resH resB(0) resB(1) Canceled", Log: "200 via_upstream whole", Upstream: "done", Faults: 1}},
		"empty message":      {mode(str), at("resH", 0, sends(&response{})), outcome{Client: "500 ", Server: "reqH. resH Canceled", Log: "500 unhandled_message whole", Upstream: "canceled", Faults: 1}},
		"streamed_response in STREAMED": {mode(str), at("resB", 1, replies(chunk("x", false))), outcome{Client: "200 0 reset", Server: "reqH. resH resB(0) resB(1) Canceled",
			Log: "200 spurious_message:_streamed_response_is_received_while_body_mode__is_not_FULL_DUPLEX_STREAMED cut", Upstream: "canceled", Faults: 1}},
		"body in FULL_DUPLEX": {mode(full), at("resB", 1, replies(body("x"))), outcome{Client: "200 0 reset", Server: "reqH. resH resB(0) resB(1) Canceled",
			Log: "200 spurious_message:_Normal_body_mutation_response_is_received_while_body_mode__is_FULL_DUPLEX_STREAMED cut", Upstream: "canceled", Faults: 1}},
		"unasked body, headers held": {mode(full), at("resH", 0, sends(early)), outcome{Client: "500 ", Server: "reqH. resH Canceled", Log: "500 spurious_message whole", Upstream: "canceled", Faults: 1}},
		"unasked body, waiting": {mode(full), at("reqH", 0, func(st stream, r *request) (bool, error) {
			return true, errors.Join(st.Send(answer(r, nil)), st.Send(early))
		}), outcome{Client: "500 ", Server: "reqH. Canceled", Log: "500 spurious_message whole", Upstream: "canceled", Faults: 1}},
		"unasked trailers in FULL_DUPLEX": {mode(full), at("resB", 1, sends(trailersReply)), outcome{Client: "200 02", Server: "reqH. resH resB(0) resB(1) Canceled", Log: "200 via_upstream whole", Upstream: "done", Faults: 1}},

		"disable_immediate_response, held":     {with(str, func(c *config) { c.DisableImmediateResponse = true }), at("resH", 0, sends(evict())), outcome{Client: "500 ", Server: "reqH. resH Canceled", Log: "500 unhandled_immediate_response_due_to_config_disabled_it whole", Upstream: "canceled", Faults: 1}},
		"disable_immediate_response, mid body": {with(str, func(c *config) { c.DisableImmediateResponse = true }), at("resB", 1, sends(evict())), outcome{Client: "200 0 reset", Server: "reqH. resH resB(0) resB(1) Canceled", Log: "200 unhandled_immediate_response_due_to_config_disabled_it cut", Upstream: "canceled", Faults: 1}},
		"disable_immediate_response, open":     {with(str, func(c *config) { c.DisableImmediateResponse, c.FailureModeAllow = true, true }), at("resB", 1, sends(evict())), outcome{Client: "200 012", Server: "reqH. resH resB(0) resB(1) Canceled", Log: "200 via_upstream whole", Upstream: "done", Faults: 1}},

		"mode_override, not allowed": {mode(str), at("reqH", 0, func(st stream, r *request) (bool, error) {
			m := answer(r, nil)
			m.ModeOverride = &modes{}
			return true, st.Send(m)
		}), outcome{Client: "200 012", Server: "reqH. resH resB(0) resB(1) resB(2) resB(). Canceled", Log: "200 via_upstream whole", Upstream: "done", Faults: 1}},
		"evict, then nil at once":   {mode(str), at("resH", 0, func(st stream, _ *request) (bool, error) { st.Send(evict()); return false, io.EOF }), outcome{Client: `429 {"error":1}`, Server: "reqH. resH", Log: "429 evicted_by_test whole", Upstream: "canceled"}},
		"evict, then error at once": {mode(str), at("resB", 1, func(st stream, _ *request) (bool, error) { st.Send(evict()); return false, errServer }), outcome{Client: "200 0 reset", Server: "reqH. resH resB(0) resB(1)", Log: "200 evicted_by_test Unavailable cut", Upstream: "canceled"}},
		"a message behind it":       {mode(str), at("resB", 1, func(st stream, r *request) (bool, error) { st.Send(evict()); return false, nil }), outcome{Client: "200 0 reset", Server: "reqH. resH resB(0) resB(1) Canceled", Log: "200 evicted_by_test cut", Upstream: "canceled", Faults: 1}},
		"two of them":               {mode(str), at("resH", 0, sends(evict(), evict())), outcome{Client: `429 {"error":1}`, Server: "reqH. resH Canceled", Log: "429 evicted_by_test whole", Upstream: "canceled", Faults: 1}},
		"no UTF-8": {mode(str), at("resH", 0, sends(details("\xff"))), outcome{Client: "500 ", Server: "reqH. resH Canceled",
			Log: "500 ext_proc_error_gRPC_error_13{grpc:_error_while_marshaling:_string_field_contains_invalid_UTF-8{via_upstream}} Internal whole", Upstream: "canceled"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := &scene{model: tokens(3)}
			s.envoy.Config = tt.config
			s.envoy.Server = &server{on: tt.on, full: tt.config.ProcessingMode.ResponseBodyMode == duplex}
			got := s.play(t)
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s\nfaults: %v", diff, s.faults)
			}
		})
	}
}

// TestLastWords: what a server has sent before it returns counts, although the proxy may see the end first.
func TestLastWords(t *testing.T) {
	for range 50 {
		s := &scene{model: tokens(3)}
		s.envoy.Config = mode(str)
		s.envoy.Server = &server{on: at("resB", 1, func(st stream, r *request) (bool, error) {
			st.Send(answer(r, body("A")))
			st.Send(evict())
			return false, io.EOF
		})}
		want := outcome{Client: "200 0A reset", Server: "reqH. resH resB(0) resB(1)", Upstream: "canceled", Log: "200 evicted_by_test cut"}
		if diff := cmp.Diff(want, s.play(t)); diff != "" {
			t.Fatalf("(-want +got):\n%s", diff)
		}
	}
}

// TestUploadStops: the client's body is closed, also under a Read, when the request is over.
func TestUploadStops(t *testing.T) {
	for name, tt := range map[string]struct {
		on func(stream, *request, int) (bool, error)
	}{
		"evicted":  {on: at("reqB", 0, sends(evict()))},
		"answered": {}, // the model does not wait for all of it
	} {
		t.Run(name, func(t *testing.T) {
			write := make(chan error, 1)
			s := &scene{
				model: func(w http.ResponseWriter, r *http.Request) { r.Body.Read(make([]byte, 1)) },
				req: func() *http.Request {
					pr, pw := io.Pipe()
					go func() {
						io.WriteString(pw, "a")
						time.Sleep(time.Millisecond)
						_, err := io.WriteString(pw, "b")
						for err == nil {
							_, err = io.WriteString(pw, "c")
						}
						write <- err
					}()
					r, _ := http.NewRequest("POST", "http://model/v1", pr)
					return r
				},
			}
			s.envoy.Config = mode(&modes{RequestBodyMode: streamed})
			s.envoy.Server = &server{on: tt.on}
			s.play(t)
			if err := <-write; err != io.ErrClosedPipe {
				t.Errorf("the client's write: %v", err)
			}
		})
	}
}

// TestSoftEnd: in FULL_DUPLEX_STREAMED the server may write what it likes and end the response.
func TestSoftEnd(t *testing.T) {
	resB := func(c *common) *response {
		return answer(&request{Request: &extprocpb.ProcessingRequest_ResponseBody{}}, c)
	}
	for name, tt := range map[string]struct {
		sends  []*response
		client string
		log    string
	}{
		"event and end":              {[]*response{resB(chunk("E", true))}, "200 0E", "200 via_upstream whole"},
		"empty end":                  {[]*response{resB(chunk("", true))}, "200 0", "200 via_upstream whole"},
		"event, then end":            {[]*response{resB(chunk("E", false)), resB(chunk("", true))}, "200 0E", "200 via_upstream whole"},
		"end, then eviction":         {[]*response{resB(chunk("E", true)), evict()}, "200 0E", "200 via_upstream whole"},
		"event, then eviction":       {[]*response{resB(chunk("E", false)), evict()}, "200 0E reset", "200 evicted_by_test cut"},
		"many chunks, then eviction": {[]*response{resB(chunk("E", false)), resB(chunk("F", false)), resB(chunk("G", false)), evict()}, "200 0EFG reset", "200 evicted_by_test cut"},
	} {
		t.Run(name, func(t *testing.T) {
			s := &scene{model: tokens(3)}
			s.envoy.Config = mode(full)
			s.envoy.Server = &server{full: true, on: at("resB", 1, sends(tt.sends...))}
			want := outcome{Client: tt.client, Server: "reqH. resH resB(0) resB(1) Canceled", Upstream: "canceled", Log: tt.log}
			if diff := cmp.Diff(want, s.play(t)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	t.Run("request", func(t *testing.T) {
		s := &scene{req: upload("a", "b", "c"), model: func(w http.ResponseWriter, r *http.Request) { io.Copy(w, r.Body) }}
		s.envoy.Config = mode(&modes{RequestBodyMode: duplex, RequestTrailerMode: send, ResponseHeaderMode: skip})
		s.envoy.Server = &server{full: true, on: at("reqB", 1, replies(chunk("END", true)))}
		want := outcome{Client: "200 aEND", Server: "reqH reqB(a) reqB(b) Canceled", Upstream: "done", Log: "200 via_upstream whole"}
		if diff := cmp.Diff(want, s.play(t)); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
	// In STREAMED the event goes into a reply, and the reset follows it.
	t.Run("STREAMED", func(t *testing.T) {
		s := &scene{model: tokens(3)}
		s.envoy.Config = mode(str)
		s.envoy.Server = &server{on: at("resB", 1, func(st stream, r *request) (bool, error) {
			return true, errors.Join(st.Send(answer(r, body("1E"))), st.Send(evict()))
		})}
		want := outcome{Client: "200 01E reset", Server: "reqH. resH resB(0) resB(1) Canceled", Upstream: "canceled", Log: "200 evicted_by_test cut"}
		if diff := cmp.Diff(want, s.play(t)); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
}

// TestLeave: a client that goes cancels the upstream; the server gets EOF, then the reset.
func TestLeave(t *testing.T) {
	closes := func(res *http.Response, err error) string {
		b := make([]byte, 1)
		io.ReadFull(res.Body, b)
		res.Body.Close()
		return string(b)
	}
	for name, tt := range map[string]struct {
		on     func(stream, *request, int) (bool, error)
		client func(*http.Response, error) string
		cancel time.Duration
		want   outcome
	}{
		"request headers held":  {on: at("reqH", 0, silent), cancel: 5 * time.Millisecond, want: outcome{Client: "canceled", Server: "reqH. EOF", Log: "0 downstream_remote_disconnect cut"}},
		"waiting":               {cancel: 5 * time.Millisecond, want: outcome{Client: "canceled", Server: "reqH. EOF", Upstream: "canceled", Log: "0 downstream_remote_disconnect cut"}},
		"response headers held": {on: at("resH", 0, silent), cancel: 15 * time.Millisecond, want: outcome{Client: "canceled", Server: "reqH. resH EOF", Upstream: "canceled", Log: "200 downstream_remote_disconnect cut"}},
		"mid body":              {cancel: 25 * time.Millisecond, want: outcome{Client: "200 01 canceled", Server: "reqH. resH resB(0) resB(1) EOF", Upstream: "canceled", Log: "200 downstream_remote_disconnect cut"}},
		"body closed":           {client: closes, want: outcome{Client: "0", Server: "reqH. resH resB(0) EOF", Upstream: "canceled", Log: "200 downstream_remote_disconnect cut"}},
		"answer not read": {on: at("resH", 0, sends(evict())), client: func(res *http.Response, err error) string { return fmt.Sprint(res.StatusCode, res.Body.Close()) },
			want: outcome{Client: "429 <nil>", Server: "reqH. resH Canceled", Upstream: "canceled", Log: "429 evicted_by_test whole"}},
		"too late": {cancel: time.Hour, want: outcome{Client: "200 012", Server: "reqH. resH resB(0) resB(1) resB(2) resB(). Canceled", Upstream: "done", Log: "200 via_upstream whole"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := &scene{model: tokens(3), client: tt.client, cancel: tt.cancel}
			s.envoy.Config = mode(str)
			s.envoy.Server = &server{on: tt.on}
			if diff := cmp.Diff(tt.want, s.play(t)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestHangUp: how and when the stream ends after an ImmediateResponse, for a server that goes on receiving and one that only
// watches its context.
func TestHangUp(t *testing.T) {
	const ms = time.Millisecond
	for name, tt := range map[string]struct {
		quirks   extproctest.Quirks
		end      string        // of Recv
		ends     time.Duration // after the answer
		canceled time.Duration // the context, after the answer
	}{
		"Reset":              {extproctest.Quirks{}, "Canceled", ms, ms},
		"later":              {extproctest.Quirks{HangUpDelay: 7 * ms}, "Canceled", 7 * ms, 7 * ms},
		"HalfClose":          {extproctest.Quirks{HangUp: extproctest.HalfClose}, "EOF", ms, 101 * ms}, // the client reads for 100 ms
		"HalfCloseThenReset": {extproctest.Quirks{HangUp: extproctest.HalfCloseThenReset}, "EOF", ms, 2 * ms},
		"Never":              {extproctest.Quirks{HangUp: extproctest.Never}, "", 0, time.Second}, // when Process returns
	} {
		t.Run(name, func(t *testing.T) {
			var end string
			var ends, canceled time.Duration
			s := &scene{model: tokens(3), client: func(res *http.Response, err error) string {
				time.Sleep(100 * ms)
				return readAll(res, err)
			}}
			s.envoy.Config = mode(str)
			s.envoy.Quirks = tt.quirks
			s.envoy.Server = serverFunc(func(st stream) error {
				for range 2 {
					r, _ := st.Recv()
					if kind(r) == "reqH" {
						st.Send(answer(r, nil))
					}
				}
				start := time.Now()
				st.Send(evict())
				received := make(chan struct{})
				go func() {
					defer close(received)
					_, err := st.Recv()
					if st.Context().Err() == nil || tt.end == "Canceled" {
						end, ends = strings.SplitN(text(err), ":", 2)[0], time.Since(start)
					}
				}()
				select {
				case <-st.Context().Done():
				case <-time.After(time.Second):
					go func() { <-st.Context().Done(); canceled = time.Since(start) }()
					return nil
				}
				canceled = time.Since(start)
				<-received
				return nil
			})
			got := s.play(t)
			if diff := cmp.Diff(outcome{Client: `429 {"error":1}`, Upstream: "canceled", Log: "429 evicted_by_test whole"}, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if end != tt.end || ends != tt.ends || canceled != tt.canceled {
				t.Errorf("Recv %s after %v, context after %v; want %s, %v, %v", end, ends, canceled, tt.end, tt.ends, tt.canceled)
			}
		})
	}
}

// TestQuirks: proxies that read on, write on, or take no notice.
func TestQuirks(t *testing.T) {
	const ms = time.Millisecond
	t.Run("KeepSending", func(t *testing.T) {
		s := &scene{model: tokens(9)}
		s.envoy.Config = mode(str)
		s.envoy.Quirks = extproctest.Quirks{KeepSending: true, HangUpDelay: 25 * ms}
		s.envoy.Server = &server{on: func(st stream, r *request, n int) (bool, error) {
			if kind(r) == "resB" && n == 1 {
				st.Send(evict())
			}
			return kind(r) == "resB" && n >= 1, nil
		}}
		want := outcome{Client: "200 0 reset", Server: "reqH. resH resB(0) resB(1) resB(2) resB(3) Canceled", Upstream: "canceled", Log: "200 evicted_by_test cut"}
		if diff := cmp.Diff(want, s.play(t)); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
	t.Run("KeepSending, Never", func(t *testing.T) {
		s := &scene{model: tokens(4)}
		s.envoy.Config = mode(str)
		s.envoy.Quirks = extproctest.Quirks{KeepSending: true, HangUp: extproctest.Never}
		s.envoy.Server = &server{on: func(st stream, r *request, n int) (bool, error) {
			if kind(r) == "reqH" {
				st.Send(answer(r, nil))
				st.Send(evict())
			}
			if r.GetResponseBody().GetEndOfStream() {
				return true, io.EOF
			}
			return true, nil
		}}
		want := outcome{Client: `429 {"error":1}`, Server: "reqH. resH resB(0) resB(1) resB(2) resB(3) resB().", Upstream: "done", Log: "429 evicted_by_test whole"}
		if diff := cmp.Diff(want, s.play(t)); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
	t.Run("Ignore", func(t *testing.T) {
		s := &scene{model: tokens(3)}
		s.envoy.Config = mode(str)
		s.envoy.Quirks = extproctest.Quirks{HangUp: extproctest.Ignore}
		s.envoy.Server = &server{on: at("resB", 1, func(st stream, r *request) (bool, error) { return false, st.Send(evict()) })}
		want := outcome{Client: "200 012", Server: "reqH. resH resB(0) resB(1) resB(2) resB(). Canceled", Upstream: "done", Log: "200 via_upstream whole", Faults: 3}
		if diff := cmp.Diff(want, s.play(t)); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
	t.Run("StopReading", func(t *testing.T) {
		var blocked time.Duration
		s := &scene{model: tokens(9), cancel: time.Second}
		s.envoy.Config = mode(str)
		s.envoy.Quirks = extproctest.Quirks{StopReading: 3, Window: 2}
		s.envoy.Server = &server{on: func(st stream, r *request, n int) (bool, error) {
			if kind(r) != "resB" || n < 3 {
				return false, nil
			}
			start := time.Now()
			st.Send(evict()) // the sixth: three are read, two in the window
			blocked = time.Since(start)
			return true, nil
		}}
		got := s.play(t)
		if got.Client != "200 0 canceled" || blocked < 900*ms {
			t.Errorf("client got %q, Send was blocked for %v", got.Client, blocked)
		}
	})
	t.Run("Pause", func(t *testing.T) {
		s := &scene{model: tokens(1)}
		s.envoy.Config = mode(str)
		s.envoy.Quirks = extproctest.Quirks{Pause: func() { time.Sleep(ms) }}
		s.envoy.Server = &server{}
		if got := s.play(t); got.Client != "200 0" || s.took < 20*ms {
			t.Errorf("client got %q after %v", got.Client, s.took)
		}
	})
	t.Run("half-closed early", func(t *testing.T) {
		s := &scene{model: tokens(1)}
		s.envoy.Config = mode(&modes{ResponseHeaderMode: skip})
		s.envoy.Quirks = extproctest.Quirks{HangUp: extproctest.HalfClose}
		s.envoy.Server = &server{}
		want := outcome{Client: "200 0", Server: "reqH. EOF", Upstream: "done", Log: "200 via_upstream whole"}
		if diff := cmp.Diff(want, s.play(t)); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
}

// TestMessageTimeout: it runs from the last message sent, stops at any reply, and not at all in FULL_DUPLEX_STREAMED.
func TestMessageTimeout(t *testing.T) {
	const ms = time.Millisecond
	after := func(d time.Duration, m *response) func(stream, *request) (bool, error) {
		return func(st stream, r *request) (bool, error) {
			time.Sleep(d)
			if m != nil {
				st.Send(m)
				time.Sleep(300 * ms)
			}
			return false, nil
		}
	}
	extend := &response{OverrideMessageTimeout: durationpb.New(400 * ms)}
	swallowed := evict()
	swallowed.OverrideMessageTimeout = durationpb.New(400 * ms)
	const timeout = "ext_proc_error_per-message_timeout_exceeded"
	for name, tt := range map[string]struct {
		modes  *modes
		config func(*config)
		on     func(stream, *request, int) (bool, error)
		want   outcome
	}{
		"request headers":                    {modes: str, on: at("reqH", 0, silent), want: outcome{Client: "504 ", Server: "reqH. EOF", Log: "504 " + timeout + " whole"}},
		"response headers":                   {modes: str, on: at("resH", 0, silent), want: outcome{Client: "504 ", Server: "reqH. resH EOF", Upstream: "done", Log: "504 " + timeout + " whole"}},
		"mid body":                           {modes: str, on: func(_ stream, r *request, n int) (bool, error) { return kind(r) == "resB" && n > 0, nil }, want: outcome{Client: "200 0 reset", Server: "reqH. resH resB(0) resB(1) resB(). EOF", Upstream: "done", Log: "200 " + timeout + " cut"}},
		"in time":                            {modes: str, on: at("resH", 0, after(199*ms, nil)), want: outcome{Client: "200 01", Server: "reqH. resH resB(01). Canceled", Upstream: "done", Log: "200 via_upstream whole"}},
		"FULL_DUPLEX":                        {modes: full, on: at("resH", 0, after(time.Second, nil)), want: outcome{Client: "200 01", Server: "reqH. resH resB(0) resB(1) resB(). Canceled", Upstream: "done", Log: "200 via_upstream whole"}},
		"open":                               {modes: str, config: failOpen, on: func(_ stream, r *request, n int) (bool, error) { return kind(r) == "resB" && n > 0, nil }, want: outcome{Client: "200 01", Server: "reqH. resH resB(0) resB(1) resB(). EOF", Upstream: "done", Log: "200 via_upstream whole"}},
		"no default for max_message_timeout": {modes: str, on: at("resH", 0, after(100*ms, extend)), want: outcome{Client: "504 ", Server: "reqH. resH Canceled", Upstream: "done", Log: "504 " + timeout + " whole", Faults: 1}},
		"override_message_timeout":           {modes: str, config: func(c *config) { c.MaxMessageTimeout = durationpb.New(time.Second) }, on: at("resH", 0, after(100*ms, extend)), want: outcome{Client: "200 01", Server: "reqH. resH resB(01). Canceled", Upstream: "done", Log: "200 via_upstream whole"}},
		"it swallows an ImmediateResponse":   {modes: full, on: at("resB", 0, func(st stream, r *request) (bool, error) { return false, st.Send(swallowed) }), want: outcome{Client: "200 01", Server: "reqH. resH resB(0) resB(1) resB(). Canceled", Upstream: "done", Log: "200 via_upstream whole", Faults: 2}},
	} {
		t.Run(name, func(t *testing.T) {
			s := &scene{model: tokens(2)}
			s.envoy.Config = &config{ProcessingMode: tt.modes} // 200 ms is the default
			if tt.config != nil {
				tt.config(s.envoy.Config)
			}
			s.envoy.Server = &server{on: tt.on, full: tt.modes == full}
			got := s.play(t)
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s\nfaults: %v", diff, s.faults)
			}
		})
	}
}

// TestObservability: nothing waits, nothing is heeded, and the stream outlives the request for deferred_close_timeout.
func TestObservability(t *testing.T) {
	var flags []bool
	s := &scene{model: withTrailer(tokens(2)), req: post("hi")}
	s.envoy.Config = with(&modes{RequestBodyMode: streamed, ResponseBodyMode: streamed, ResponseTrailerMode: send}, func(c *config) {
		c.ObservabilityMode, c.DeferredCloseTimeout = true, durationpb.New(time.Second)
	})
	var ended time.Duration
	srv := &server{}
	srv.on = func(st stream, r *request, n int) (bool, error) {
		flags = append(flags, r.ObservabilityMode)
		if kind(r) == "resB" && n == 0 {
			return true, st.Send(evict())
		}
		return kind(r) != "reqH", nil
	}
	s.envoy.Server = serverFunc(func(st stream) error {
		start := time.Now()
		defer func() { ended = time.Since(start) }()
		return srv.Process(st)
	})
	want := outcome{Client: "200 01 X-Usage=7", Upstream: "done", Log: "200 via_upstream whole"}
	if diff := cmp.Diff(want, s.play(t)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if diff := cmp.Diff("reqH reqB(hi) reqB(). resH resB(0) resB(1) resT EOF", strings.Join(srv.seen, " ")); diff != "" {
		t.Errorf("server (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]bool{true, true, true, true, true, true, true}, flags); diff != "" {
		t.Errorf("observability_mode (-want +got):\n%s", diff)
	}
	if s.took != 30*time.Millisecond || ended != 1030*time.Millisecond {
		t.Errorf("the client had its end after %v, the server after %v", s.took, ended)
	}
}

package extproctest_test

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/google/go-cmp/cmp"
)

// TestMessages: what a server that answers all is asked in each mode, how its stream ends, and what the client gets. A
// stream that is closed because no phase needs it is reset, one that the request outlived gets EOF.
func TestMessages(t *testing.T) {
	override := func(m, to *modes, on string) *scene {
		s := &scene{}
		s.envoy.Config = mode(m)
		s.envoy.Config.AllowModeOverride = true
		s.envoy.Server = &server{on: at(on, 0, func(st stream, r *request) (bool, error) {
			m := answer(r, nil)
			m.ModeOverride = to
			return true, st.Send(m)
		})}
		return s
	}
	for name, tt := range map[string]struct {
		modes  *modes
		scene  *scene // if more is needed than modes
		full   bool
		model  http.HandlerFunc
		req    func() *http.Request
		server string
		client string
	}{
		"defaults":            {server: "reqH. resH Canceled"},
		"nothing":             {modes: &modes{RequestHeaderMode: skip, ResponseHeaderMode: skip}, server: ""},
		"request headers":     {modes: &modes{ResponseHeaderMode: skip}, server: "reqH. Canceled"},
		"response headers":    {modes: &modes{RequestHeaderMode: skip}, server: "resH Canceled"},
		"trailers that don't": {modes: &modes{ResponseTrailerMode: send}, server: "reqH. resH EOF"},
		"trailers that come":  {modes: &modes{ResponseTrailerMode: send}, model: withTrailer(tokens(2)), server: "reqH. resH resT Canceled", client: "200 01 X-Usage=7"},

		"STREAMED":                    {modes: &modes{ResponseBodyMode: streamed}, server: "reqH. resH resB(0) resB(1) resB(). Canceled"},
		"STREAMED, headers SKIP":      {modes: &modes{RequestHeaderMode: skip, ResponseHeaderMode: skip, ResponseBodyMode: streamed}, server: "resB(0) resB(1) resB(). Canceled"},
		"STREAMED, trailers SEND":     {modes: &modes{ResponseBodyMode: streamed, ResponseTrailerMode: send}, model: withTrailer(tokens(2)), server: "reqH. resH resB(0) resB(1) resT Canceled", client: "200 01 X-Usage=7"},
		"STREAMED, trailers SKIP":     {modes: &modes{ResponseBodyMode: streamed}, model: withTrailer(tokens(2)), server: "reqH. resH resB(0) resB(1) EOF", client: "200 01 X-Usage=7"},
		"STREAMED, no body":           {modes: &modes{ResponseBodyMode: streamed}, model: func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(204) }, server: "reqH. resH. Canceled", client: "204 "},
		"STREAMED, empty body":        {modes: &modes{ResponseBodyMode: streamed}, model: tokens(0), server: "reqH. resH. Canceled", client: "200 "},
		"STREAMED request":            {modes: &modes{RequestBodyMode: streamed}, req: upload("a", "b"), server: "reqH reqB(a) reqB(b) reqB(). resH Canceled"},
		"STREAMED request, in memory": {modes: &modes{RequestBodyMode: streamed}, req: post("ab"), server: "reqH reqB(ab). resH EOF"},
		"BUFFERED request":            {modes: &modes{RequestBodyMode: buffered}, req: upload("a", "b"), server: "reqH reqB(ab). resH EOF"},
		"BUFFERED":                    {modes: &modes{ResponseBodyMode: buffered}, server: "reqH. resH resB(01). Canceled"},
		"BUFFERED, trailers SEND":     {modes: &modes{ResponseBodyMode: buffered, ResponseTrailerMode: send}, model: withTrailer(tokens(2)), server: "reqH. resH resB(01) resT Canceled", client: "200 01 X-Usage=7"},
		"BUFFERED_PARTIAL":            {modes: &modes{ResponseBodyMode: partial}, server: "reqH. resH resB(01). Canceled"},
		"FULL_DUPLEX_STREAMED":        {modes: &modes{ResponseBodyMode: duplex, ResponseTrailerMode: send}, full: true, server: "reqH. resH resB(0) resB(1) resB(). Canceled"},
		"FULL_DUPLEX_STREAMED, trailers": {modes: &modes{ResponseBodyMode: duplex, ResponseTrailerMode: send}, full: true, model: withTrailer(tokens(2)),
			server: "reqH. resH resB(0) resB(1) resT Canceled", client: "200 01 X-Usage=7"},
		"FULL_DUPLEX_STREAMED request": {modes: &modes{RequestBodyMode: duplex, RequestTrailerMode: send}, full: true, req: upload("a", "b"), server: "reqH reqB(a) reqB(b) reqB(). resH Canceled"},

		"override to STREAMED": {scene: override(&modes{ResponseHeaderMode: skip}, &modes{ResponseHeaderMode: send, ResponseBodyMode: streamed}, "reqH"),
			server: "reqH. resH resB(0) resB(1) resB(). Canceled"},
		"override to trailers": {scene: override(&modes{ResponseHeaderMode: skip}, &modes{ResponseTrailerMode: send}, "reqH"), server: "reqH. EOF"},
		"override replaces body modes": {scene: override(&modes{RequestBodyMode: streamed, ResponseTrailerMode: send}, &modes{ResponseBodyMode: streamed}, "reqH"), req: upload("a"),
			model: withTrailer(tokens(2)), server: "reqH resH resB(0) resB(1) resT Canceled", client: "200 01 X-Usage=7"},
		"override at response headers": {scene: override(&modes{}, &modes{ResponseBodyMode: streamed}, "resH"), server: "reqH. resH resB(0) resB(1) resB(). Canceled"},
	} {
		t.Run(name, func(t *testing.T) {
			s := tt.scene
			if s == nil {
				s = &scene{}
				s.envoy.Config = mode(tt.modes)
				s.envoy.Server = &server{full: tt.full}
			}
			if s.model, s.req = tt.model, tt.req; s.model == nil {
				s.model = tokens(2)
			}
			want := outcome{Client: tt.client, Server: tt.server, Upstream: "done", Log: "200 via_upstream whole"}
			if want.Client == "" {
				want.Client = "200 01"
			}
			if strings.HasPrefix(want.Client, "204") {
				want.Log = "204 via_upstream whole"
			}
			if diff := cmp.Diff(want, s.play(t)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestFirstMessage: names, values and protocol_config.
func TestFirstMessage(t *testing.T) {
	var first, second *request
	s := &scene{model: tokens(1), req: func() *http.Request {
		r := post("hello")()
		r.Header.Set("X-Request-Id", "r1")
		r.Header["X-Two"] = []string{"a", "b"}
		return r
	}}
	s.envoy.Config = mode(&modes{RequestBodyMode: buffered, ResponseBodyMode: streamed})
	s.envoy.Server = &server{on: func(_ stream, r *request, _ int) (bool, error) {
		if first == nil {
			first = r
		} else if second == nil {
			second = r
		}
		return false, nil
	}}
	s.play(t)
	var got []string
	for _, h := range first.GetRequestHeaders().GetHeaders().GetHeaders() {
		got = append(got, h.Key+"="+string(h.RawValue))
		if h.Value != "" {
			t.Errorf("%s has a value", h.Key)
		}
	}
	want := []string{":authority=model", ":method=POST", ":path=/v1", ":scheme=http", "content-length=5", "x-forwarded-proto=http", "x-request-id=r1", "x-two=a", "x-two=b"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("headers (-want +got):\n%s", diff)
	}
	if c := first.ProtocolConfig; c.GetRequestBodyMode() != buffered || c.GetResponseBodyMode() != streamed || second.ProtocolConfig != nil {
		t.Errorf("protocol_config %v, then %v", c, second.ProtocolConfig)
	}
	if s.entry.RequestID != "r1" || s.entry.Method != "POST" || s.entry.Path != "/v1" || s.entry.Bytes != 1 {
		t.Errorf("entry %+v", s.entry)
	}
}

// TestInFlight: STREAMED chunks are sent without waiting for replies, replies belong to the oldest chunk, and trailers wait
// for them.
func TestInFlight(t *testing.T) {
	s := &scene{model: withTrailer(tokens(3))}
	s.envoy.Config = mode(&modes{ResponseBodyMode: streamed, ResponseTrailerMode: send})
	srv := &server{}
	var owed []*request
	srv.on = func(st stream, r *request, n int) (bool, error) {
		if kind(r) != "resB" {
			return false, nil
		}
		if owed = append(owed, r); len(owed) == 3 {
			time.Sleep(50 * time.Millisecond) // the end comes meanwhile
			srv.note("answers")
			for i, r := range owed {
				st.Send(answer(r, []*common{body("A"), nil, {BodyMutation: &extprocpb.BodyMutation{Mutation: &extprocpb.BodyMutation_ClearBody{ClearBody: true}}}}[i]))
			}
		}
		return true, nil
	}
	s.envoy.Server = srv
	want := outcome{Client: "200 A1 X-Usage=7", Server: "reqH. resH resB(0) resB(1) resB(2) answers resT Canceled", Upstream: "done", Log: "200 via_upstream whole"}
	if diff := cmp.Diff(want, s.play(t)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestBackpressure: a slow server or client stops the upstream at the buffer limit.
func TestBackpressure(t *testing.T) {
	for name, tt := range map[string]struct {
		modes  *modes
		on     func(stream, *request, int) (bool, error)
		client func(*http.Response, error) string
		at     time.Duration // the upstream can go on
	}{
		"slow server": {modes: &modes{ResponseBodyMode: streamed}, on: at("resB", 0, func(st stream, r *request) (bool, error) {
			time.Sleep(time.Second)
			return false, nil
		}), at: time.Second},
		"response headers held": {modes: &modes{ResponseBodyMode: streamed}, on: at("resH", 0, func(st stream, r *request) (bool, error) {
			time.Sleep(time.Second)
			return false, nil
		}), at: time.Second},
		"slow client": {modes: &modes{}, client: func(res *http.Response, err error) string {
			time.Sleep(time.Second)
			return readAll(res, err)
		}, at: time.Second},
		"all quick": {modes: &modes{ResponseBodyMode: streamed}},
	} {
		t.Run(name, func(t *testing.T) {
			var took time.Duration
			piece := strings.Repeat("x", 1000)
			s := &scene{client: tt.client, model: func(w http.ResponseWriter, r *http.Request) {
				start := time.Now()
				for range 20 {
					io.WriteString(w, piece)
					w.(http.Flusher).Flush()
				}
				took = time.Since(start)
			}}
			s.envoy.BufferLimit = 4000
			s.envoy.Config = mode(tt.modes)
			s.envoy.Server = &server{on: tt.on}
			got := s.play(t)
			if got.Client != "200 "+strings.Repeat(piece, 20) {
				t.Errorf("client got %d bytes", len(got.Client))
			}
			if took != tt.at {
				t.Errorf("the upstream was held up for %v, want %v", took, tt.at)
			}
		})
	}
}

// TestWholeResponse: a response that is complete before the reply to its headers waits for the reply to its body, and an
// eviction then still gives an answer.
func TestWholeResponse(t *testing.T) {
	slow := func(st stream, r *request, n int) (bool, error) {
		if kind(r) == "resH" {
			time.Sleep(20 * time.Millisecond)
		}
		return false, nil
	}
	evictsAt := func(what string) func(stream, *request, int) (bool, error) {
		return func(st stream, r *request, n int) (bool, error) {
			if kind(r) == what && n == 0 {
				return true, st.Send(evict())
			}
			return slow(st, r, n)
		}
	}
	for name, tt := range map[string]struct {
		modes  *modes
		on     func(stream, *request, int) (bool, error)
		model  http.HandlerFunc
		server string
		client string
	}{
		"STREAMED":                        {&modes{ResponseBodyMode: streamed}, slow, whole, "reqH. resH resB(all of it). Canceled", "200 all of it"},
		"STREAMED, trailers":              {&modes{ResponseBodyMode: streamed}, slow, withTrailer(whole), "reqH. resH resB(all of it) Canceled", "200 all of it X-Usage=7"},
		"STREAMED, evicted":               {&modes{ResponseBodyMode: streamed}, evictsAt("resB"), whole, "reqH. resH resB(all of it). Canceled", `429 {"error":1}`},
		"FULL_DUPLEX":                     {&modes{ResponseBodyMode: duplex, ResponseTrailerMode: send}, slow, whole, "reqH. resH resB(all of it) resB(). Canceled", "200 all of it"},
		"FULL_DUPLEX, evicted":            {&modes{ResponseBodyMode: duplex, ResponseTrailerMode: send}, evictsAt("resB"), whole, "", `429 {"error":1}`}, // the end may cross the answer
		"NONE, trailers":                  {&modes{ResponseTrailerMode: send}, slow, withTrailer(whole), "reqH. resH resT Canceled", "200 all of it X-Usage=7"},
		"NONE, trailers, evicted":         {&modes{ResponseTrailerMode: send}, evictsAt("resT"), withTrailer(whole), "reqH. resH resT Canceled", `429 {"error":1}`},
		"STREAMED, both, evicted":         {&modes{ResponseBodyMode: streamed, ResponseTrailerMode: send}, evictsAt("resT"), withTrailer(whole), "reqH. resH resB(all of it) resT Canceled", `429 {"error":1}`},
		"BUFFERED, both, evicted":         {&modes{ResponseBodyMode: buffered, ResponseTrailerMode: send}, evictsAt("resT"), withTrailer(whole), "reqH. resH resB(all of it) resT Canceled", `429 {"error":1}`},
		"BUFFERED_PARTIAL, both, evicted": {&modes{ResponseBodyMode: partial, ResponseTrailerMode: send}, evictsAt("resT"), withTrailer(whole), "reqH. resH resB(all of it) resT Canceled", "200 all of it reset"},
		"BUFFERED, evicted":               {&modes{ResponseBodyMode: buffered}, evictsAt("resB"), whole, "reqH. resH resB(all of it). Canceled", `429 {"error":1}`},
	} {
		t.Run(name, func(t *testing.T) {
			s := &scene{model: tt.model}
			s.envoy.Config = mode(tt.modes)
			s.envoy.Server = &server{on: tt.on, full: tt.modes.ResponseBodyMode == duplex}
			got := s.play(t)
			if diff := cmp.Diff(tt.client, got.Client); diff != "" {
				t.Errorf("client (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tt.server, got.Server); diff != "" && tt.server != "" {
				t.Errorf("server (-want +got):\n%s", diff)
			}
		})
	}
}

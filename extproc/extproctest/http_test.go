package extproctest_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corepb "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typepb "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/extevict/extevict/extproc/extproctest"
)

// TestHeaderMutation: what a reply to headers can change, in the request that the upstream gets and the client's response.
func TestHeaderMutation(t *testing.T) {
	appended := header("x-old", "more")
	//lint:ignore SA1019 it is the field that Envoy reads
	appended.Append = wrapperspb.Bool(true)
	text := &corepb.HeaderValueOption{Header: &corepb.HeaderValue{Key: "x-text", Value: "lost"}}
	ifAbsent := header("x-old", "new")
	ifAbsent.AppendAction = corepb.HeaderValueOption_ADD_IF_ABSENT
	for name, tt := range map[string]struct {
		set    []*corepb.HeaderValueOption
		remove []string
		up     string // request line, host and x- headers at the upstream
		down   string // status and x- headers at the client
		faults int
	}{
		"none":          {nil, nil, "GET /v1 model x-old=[old]", "200 x-old=[old]", 0},
		"replace":       {[]*corepb.HeaderValueOption{header("X-Old", "new"), header("x-new", "1")}, nil, "GET /v1 model x-new=[1] x-old=[new]", "200 x-new=[1] x-old=[new]", 0},
		"append":        {[]*corepb.HeaderValueOption{appended}, nil, "GET /v1 model x-old=[old more]", "200 x-old=[old more]", 0},
		"append_action": {[]*corepb.HeaderValueOption{ifAbsent}, nil, "GET /v1 model x-old=[new]", "200 x-old=[new]", 0},
		"remove, then set": {[]*corepb.HeaderValueOption{header("x-new", "1")}, []string{"X-Old", "x-new", ":path", ":status", "host"},
			"GET /v1 model x-new=[1]", "200 x-new=[1]", 0},
		"path":      {[]*corepb.HeaderValueOption{header(":path", "/v2?q=1")}, nil, "GET /v2?q=1 model x-old=[old]", "200 x-old=[old]", 1},
		"status":    {[]*corepb.HeaderValueOption{header(":status", "203")}, nil, "GET /v1 model x-old=[old]", "203 x-old=[old]", 1},
		"fixed":     {[]*corepb.HeaderValueOption{header(":method", "PUT"), header("host", "h"), header("x-envoy-a", "1"), header("x-new", "1")}, nil, "GET /v1 model x-new=[1] x-old=[old]", "200 x-new=[1] x-old=[old]", 6},
		"text":      {[]*corepb.HeaderValueOption{text}, nil, "GET /v1 model x-old=[old] x-text=[]", "200 x-old=[old] x-text=[]", 2},
		"bad name":  {[]*corepb.HeaderValueOption{header("x new", "1")}, nil, "", "500", 2},
		"bad value": {[]*corepb.HeaderValueOption{header("x-new", "a\nb")}, nil, "", "500", 2},
	} {
		t.Run(name, func(t *testing.T) {
			xs := func(h http.Header) (s string) {
				for _, k := range []string{"X-Envoy-A", "X-New", "X-Old", "X-Text"} {
					if v, ok := h[k]; ok {
						s += fmt.Sprint(" ", strings.ToLower(k), "=", v)
					}
				}
				return s
			}
			up := ""
			s := &scene{
				req: func() *http.Request {
					r, _ := http.NewRequest("GET", "http://model/v1", nil)
					r.Header.Set("X-Old", "old")
					return r
				},
				model: func(w http.ResponseWriter, r *http.Request) {
					up = r.Method + " " + r.RequestURI + " " + r.Host + xs(r.Header)
					w.Header().Set("X-Old", "old")
				},
				client: func(res *http.Response, err error) string {
					res.Body.Close()
					return fmt.Sprint(res.StatusCode, xs(res.Header))
				},
			}
			s.envoy.Server = &server{on: func(st stream, r *request, _ int) (bool, error) {
				return true, st.Send(answer(r, &common{HeaderMutation: &extprocpb.HeaderMutation{SetHeaders: tt.set, RemoveHeaders: tt.remove}}))
			}}
			got := s.play(t)
			if diff := cmp.Diff(tt.up, up); diff != "" {
				t.Errorf("upstream (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tt.down, got.Client); diff != "" {
				t.Errorf("client (-want +got):\n%s", diff)
			}
			if got.Faults != tt.faults {
				t.Errorf("%d faults, want %d: %v", got.Faults, tt.faults, s.faults)
			}
		})
	}
}

// TestContentLength: it goes where the body may change after the headers have been sent.
func TestContentLength(t *testing.T) {
	resB := func(c *common) func(stream, *request, int) (bool, error) { return at("resB", 0, replies(c)) }
	fixed := body("mine")
	fixed.HeaderMutation = headers(header("content-length", "4")).HeaderMutation
	for name, tt := range map[string]struct {
		config *config
		on     func(stream, *request, int) (bool, error)
		want   string
	}{
		"NONE":                             {mode(&modes{}), nil, "200 9 all of it"},
		"STREAMED":                         {mode(str), nil, "200 -1 all of it"},
		"STREAMED, changed":                {mode(str), resB(body("mine")), "200 -1 mine"},
		"allow_content_length_header":      {with(str, func(c *config) { c.AllowContentLengthHeader = true }), nil, "200 9 all of it"},
		"FULL_DUPLEX":                      {mode(full), nil, "200 -1 all of it"},
		"BUFFERED":                         {mode(&modes{ResponseBodyMode: buffered}), nil, "200 9 all of it"},
		"BUFFERED, headers SKIP":           {mode(&modes{ResponseBodyMode: buffered, ResponseHeaderMode: skip}), nil, "200 -1 all of it"},
		"BUFFERED, changed, length, too":   {mode(&modes{ResponseBodyMode: buffered}), resB(fixed), "200 4 mine"},
		"BUFFERED, changed, length is not": {mode(&modes{ResponseBodyMode: buffered}), resB(body("mine")), "500 0 "},
	} {
		t.Run(name, func(t *testing.T) {
			s := &scene{model: whole, client: func(res *http.Response, err error) string {
				b, _ := io.ReadAll(res.Body)
				if cl := res.Header.Get("Content-Length"); (cl == "") != (res.ContentLength < 0) {
					t.Errorf("header %q, field %d", cl, res.ContentLength)
				}
				return fmt.Sprint(res.StatusCode, " ", res.ContentLength, " ", string(b))
			}}
			s.envoy.Config = tt.config
			s.envoy.Server = &server{on: tt.on, full: tt.config.ProcessingMode.ResponseBodyMode == duplex}
			if diff := cmp.Diff(tt.want, s.play(t).Client); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestReplace: CONTINUE_AND_REPLACE in replies to headers.
func TestReplace(t *testing.T) {
	replace := func(c *common) *common {
		c.Status = extprocpb.CommonResponse_CONTINUE_AND_REPLACE
		return c
	}
	for name, tt := range map[string]struct {
		at   string
		with *common
		req  func() *http.Request
		want outcome
	}{
		"request":               {"reqH", body("new"), upload("a", "b"), outcome{Client: "200 new", Server: "reqH resH resB(new) resB(). Canceled"}},
		"request without body":  {"reqH", body("new"), nil, outcome{Client: "200 new", Server: "reqH. resH resB(new) resB(). Canceled"}},
		"request kept":          {"reqH", &common{}, post("old"), outcome{Client: "200 old", Server: "reqH resH resB(old) resB(). Canceled"}},
		"response":              {"resH", body("new"), post("old"), outcome{Client: "200 new", Server: "reqH reqB(old). resH Canceled"}},
		"response kept":         {"resH", &common{}, post("old"), outcome{Client: "200 old", Server: "reqH reqB(old). resH EOF"}},
		"response without body": {"resH", body(""), post("old"), outcome{Client: "200 ", Server: "reqH reqB(old). resH Canceled"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := &scene{req: tt.req, model: func(w http.ResponseWriter, r *http.Request) {
				w.(http.Flusher).Flush()
				time.Sleep(10 * time.Millisecond)
				io.Copy(w, r.Body)
				w.(http.Flusher).Flush()
				time.Sleep(10 * time.Millisecond)
			}}
			s.envoy.Config = mode(&modes{RequestBodyMode: streamed, ResponseBodyMode: streamed})
			s.envoy.Server = &server{on: at(tt.at, 0, replies(replace(tt.with)))}
			got := s.play(t)
			tt.want.Log, tt.want.Upstream = "200 via_upstream whole", got.Upstream
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestImmediateResponse: its fields, measured.
func TestImmediateResponse(t *testing.T) {
	type m = extprocpb.ImmediateResponse
	set := func(h ...*corepb.HeaderValueOption) *extprocpb.HeaderMutation {
		return &extprocpb.HeaderMutation{SetHeaders: h}
	}
	status := func(code int32) *typepb.HttpStatus { return &typepb.HttpStatus{Code: typepb.StatusCode(code)} }
	for name, tt := range map[string]struct {
		method string
		in     *m
		want   string // status, body, headers
		log    string
		faults int
	}{
		"empty":       {"", &m{}, "200  map[Content-Length:[0]]", "200  whole", 1},
		"status 100":  {"", &m{Status: status(100)}, "200  map[Content-Length:[0]]", "200  whole", 1},
		"status 599":  {"", &m{Status: status(599)}, "599  map[Content-Length:[0]]", "599  whole", 0},
		"body":        {"", &m{Status: status(429), Body: []byte("no"), Details: "a  b\tc"}, "429 no map[Content-Length:[2] Content-Type:[text/plain]]", "429 a__b_c whole", 0},
		"HEAD":        {"HEAD", &m{Status: status(429), Body: []byte("no")}, "429  map[Content-Length:[2] Content-Type:[text/plain]]", "429  whole", 0},
		"headers":     {"", &m{Status: status(429), Body: []byte("{}"), Headers: set(header("Content-Type", "application/json"), header("retry-after", "1"))}, "429 {} map[Content-Length:[2] Content-Type:[application/json] Retry-After:[1]]", "429  whole", 0},
		"without use": {"", &m{Status: status(429), Headers: set(header(":status", "200"), header("content-length", "9"), header("x-envoy-a", "1"), header("host", "h"), header("x", "1"))}, "429  map[Content-Length:[0] X:[1]]", "429  whole", 4},
		"invalid":     {"", &m{Status: status(429), Headers: set(header("x", "1"), header("a b", "1"), header("y", "1"))}, "429  map[Content-Length:[0] X:[1]]", "429  whole", 1},
		"nil header":  {"", &m{Status: status(429), Headers: set(nil)}, "429  map[Content-Length:[0]]", "429  whole", 1},
	} {
		t.Run(name, func(t *testing.T) {
			s := &scene{req: func() *http.Request {
				r, _ := http.NewRequest(tt.method, "http://model/v1", nil)
				return r
			}, client: func(res *http.Response, err error) string {
				b, _ := io.ReadAll(res.Body)
				return fmt.Sprint(res.StatusCode, " ", string(b), " ", res.Header)
			}}
			s.envoy.Server = &server{on: at("reqH", 0, sends(&response{Response: &extprocpb.ProcessingResponse_ImmediateResponse{ImmediateResponse: tt.in}}))}
			want := outcome{Client: tt.want, Server: "reqH. Canceled", Log: tt.log, Faults: tt.faults}
			if diff := cmp.Diff(want, s.play(t)); diff != "" {
				t.Errorf("(-want +got):\n%s\nfaults: %v", diff, s.faults)
			}
		})
	}
}

func TestMetadata(t *testing.T) {
	md := func(ns, k string) *structpb.Struct {
		return &structpb.Struct{Fields: map[string]*structpb.Value{ns: structpb.NewStructValue(&structpb.Struct{Fields: map[string]*structpb.Value{k: structpb.NewBoolValue(true)}})}}
	}
	s := &scene{model: tokens(1)}
	s.envoy.Config = with(str, func(c *config) {
		c.MetadataOptions = &filterpb.MetadataOptions{ReceivingNamespaces: &filterpb.MetadataOptions_MetadataNamespaces{Untyped: []string{"mine"}}}
	})
	s.envoy.Server = &server{on: func(st stream, r *request, _ int) (bool, error) {
		m := answer(r, nil)
		switch kind(r) {
		case "reqH":
			m.DynamicMetadata = md("mine", "a")
		case "resH":
			m.DynamicMetadata = md("other", "b")
		case "resB":
			m = evict()
			m.DynamicMetadata = md("mine", "c")
		}
		return true, st.Send(m)
	}}
	s.play(t)
	if got := s.entry.Metadata; len(got) != 1 || len(got["mine"].GetFields()) != 2 {
		t.Errorf("metadata %v", got)
	}
}

// TestUpstreamFails: Envoy's own answers go through the server, as the upstream's would.
func TestUpstreamFails(t *testing.T) {
	big := strings.Repeat("x", 3000)
	abort := func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, "a")
		w.(http.Flusher).Flush()
		time.Sleep(10 * time.Millisecond)
		panic(http.ErrAbortHandler)
	}
	for name, tt := range map[string]struct {
		config   *config
		upstream roundTripper
		req      func() *http.Request
		want     outcome
	}{
		"no response": {mode(str), func(*http.Request) (*http.Response, error) { return nil, io.EOF }, nil, outcome{
			Client: "503 upstream connect error or disconnect/reset before headers. reset reason: connection termination",
			Server: "reqH. resH resB(upstream connect error or disconnect/reset before headers. reset reason: connection termination). Canceled",
			Log:    "503 upstream_reset_before_response_started{connection_termination} whole"}},
		"no connection": {mode(&modes{}), func(*http.Request) (*http.Response, error) {
			return nil, &net.OpError{Op: "dial", Err: errors.New("refused")}
		}, nil, outcome{Client: "503 upstream connect error or disconnect/reset before headers. reset reason: remote connection failure", Server: "reqH. resH Canceled",
			Log: "503 upstream_reset_before_response_started{remote_connection_failure} whole"}},
		"cut": {mode(str), extproctest.Handler(http.HandlerFunc(abort)).RoundTrip, nil, outcome{Client: "200 a reset", Server: "reqH. resH resB(a) EOF",
			Log: "200 upstream_reset_after_response_started{connection_termination} cut"}},
		"cut before the headers are released": {mode(&modes{ResponseBodyMode: buffered}), extproctest.Handler(http.HandlerFunc(abort)).RoundTrip, nil, outcome{Client: "reset", Server: "reqH. resH EOF",
			Log: "200 upstream_reset_after_response_started{connection_termination} cut"}},
		"BUFFERED request too large": {mode(&modes{RequestBodyMode: buffered}), nil, upload(big), outcome{Client: "413 Payload Too Large", Server: "reqH resH Canceled", Log: "413 request_payload_too_large whole"}},
		"BUFFERED response too large": {mode(&modes{ResponseBodyMode: buffered}), extproctest.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.(http.Flusher).Flush()
			time.Sleep(time.Millisecond)
			io.WriteString(w, big)
		})).RoundTrip, nil, outcome{Client: "500 Internal Server Error", Server: "reqH. resH Canceled", Log: "500 response_payload_too_large whole"}},
		"BUFFERED_PARTIAL over the limit": {mode(&modes{ResponseBodyMode: partial}), extproctest.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			for _, s := range []string{"a", big, "b"} {
				io.WriteString(w, s)
				w.(http.Flusher).Flush()
				time.Sleep(time.Millisecond)
			}
		})).RoundTrip, nil, outcome{Client: "200 a" + big + "b", Server: "reqH. resH resB(a" + big + ") EOF", Log: "200 via_upstream whole"}},
		"client's body breaks": {mode(str), extproctest.Handler(tokens(1)).RoundTrip, func() *http.Request {
			r, _ := http.NewRequest("POST", "http://model/v1", io.MultiReader(strings.NewReader("a"), brokenReader{}))
			return r
		}, outcome{Client: "broken", Server: "reqH EOF", Log: "0 downstream_remote_disconnect cut"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := &scene{req: tt.req}
			if tt.upstream == nil {
				tt.upstream = extproctest.Handler(tokens(1)).RoundTrip
			}
			s.envoy.BufferLimit = 2000
			s.envoy.Config = tt.config
			s.envoy.Server = &server{}
			s.upstream = tt.upstream
			if diff := cmp.Diff(tt.want, s.play(t)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

type brokenReader struct{}

func (brokenReader) Read([]byte) (int, error) { return 0, errors.New("broken") }

// TestRequestTrailers: they reach the server, which may change them, and the upstream.
func TestRequestTrailers(t *testing.T) {
	got := ""
	s := &scene{
		model: func(w http.ResponseWriter, r *http.Request) {
			b, _ := io.ReadAll(r.Body)
			got = fmt.Sprint(string(b), " ", r.Trailer)
		},
		req: func() *http.Request {
			pr, pw := io.Pipe()
			r, _ := http.NewRequest("POST", "http://model/v1", pr)
			r.Trailer = http.Header{"X-Sum": nil}
			go func() {
				io.WriteString(pw, "a")
				time.Sleep(time.Millisecond)
				r.Trailer.Set("X-Sum", "1")
				pw.Close()
			}()
			return r
		},
	}
	s.envoy.Config = mode(&modes{RequestBodyMode: streamed, RequestTrailerMode: send})
	s.envoy.Server = &server{on: at("reqT", 0, replies(headers(header("x-sum", "2"))))}
	want := outcome{Client: "200 ", Server: "reqH reqB(a) reqT resH. Canceled", Upstream: "done", Log: "200 via_upstream whole"}
	if diff := cmp.Diff(want, s.play(t)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if want := "a map[X-Sum:[2]]"; got != want {
		t.Errorf("the upstream got %q, want %q", got, want)
	}
}

// TestBadConfig: what Envoy would refuse, or this package does not do.
func TestBadConfig(t *testing.T) {
	for name, tt := range map[string]struct {
		config *config
		want   string
	}{
		"body mode": {mode(&modes{ResponseBodyMode: filterpb.ProcessingMode_GRPC}), "extproctest: body mode GRPC is not modelled"},
		"trailers":  {mode(&modes{ResponseBodyMode: duplex}), "extproctest: FULL_DUPLEX_STREAMED needs the trailer mode of its side to be SEND"},
		"field":     {&config{RequestAttributes: []string{"a"}}, "extproctest: request_attributes is not modelled"},
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if diff := cmp.Diff(any(tt.want), recover()); diff != "" {
					t.Errorf("panic (-want +got):\n%s", diff)
				}
			}()
			(&extproctest.Envoy{Config: tt.config}).RoundTrip(httptest.NewRequest("GET", "http://model/", nil))
		})
	}
}

func TestHandler(t *testing.T) {
	type got struct {
		Head string // status, content length, content type
		Body string // the pieces as they arrive, the error, the trailers
		Gone bool   // the handler's context was canceled before it returned
	}
	const ms = time.Millisecond
	for name, tt := range map[string]struct {
		serve  http.HandlerFunc
		req    func() *http.Request
		read   int           // pieces, then close
		cancel time.Duration // the client leaves
		want   got
	}{
		"nothing": {serve: func(http.ResponseWriter, *http.Request) {}, want: got{Head: "200 0 ", Body: "EOF"}},
		"short":   {serve: func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "a"); io.WriteString(w, "b") }, want: got{Head: "200 2 text/plain; charset=utf-8", Body: "ab EOF"}},
		"streamed": {serve: func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "x/y")
			w.WriteHeader(201)
			w.WriteHeader(500)
			for _, s := range []string{"a", "b"} {
				io.WriteString(w, s)
				http.NewResponseController(w).Flush()
				time.Sleep(ms)
			}
			io.WriteString(w, "c")
		}, want: got{Head: "201 -1 x/y", Body: "a b c EOF"}},
		"length set": {serve: func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "1")
			w.(http.Flusher).Flush()
			io.WriteString(w, "a")
		}, want: got{Head: "200 1 ", Body: "a EOF"}},
		"trailers": {serve: func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Trailer", "X-A")
			io.WriteString(w, "a")
			w.Header().Set("X-A", "1")
			w.Header().Set(http.TrailerPrefix+"X-B", "2")
		}, want: got{Head: "200 -1 text/plain; charset=utf-8", Body: "a EOF map[X-A:[1] X-B:[2]]"}},
		"no body allowed": {serve: func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(204)
			if _, err := io.WriteString(w, "a"); err != http.ErrBodyNotAllowed {
				panic(err)
			}
		}, want: got{Head: "204 -1 ", Body: "EOF"}},
		"HEAD":         {serve: whole, req: func() *http.Request { r, _ := http.NewRequest("HEAD", "http://model/", nil); return r }, want: got{Head: "200 9 text/plain; charset=utf-8", Body: "EOF"}},
		"request body": {serve: func(w http.ResponseWriter, r *http.Request) { io.Copy(w, r.Body) }, req: post("hello"), want: got{Head: "200 5 text/plain; charset=utf-8", Body: "hello EOF"}},
		"panic": {serve: func(w http.ResponseWriter, _ *http.Request) {
			w.(http.Flusher).Flush()
			io.WriteString(w, "lost")
			panic("x")
		}, want: got{Head: "200 -1 ", Body: "unexpected EOF"}},
		"early panic":              {serve: func(http.ResponseWriter, *http.Request) { panic("x") }, want: got{Head: "extproctest: no response from the handler: unexpected EOF"}},
		"closed":                   {serve: tokens(9), read: 2, want: got{Head: "200 -1 text/event-stream", Body: "0 1 closed", Gone: true}},
		"canceled":                 {serve: tokens(9), cancel: 25 * ms, want: got{Head: "200 -1 text/event-stream", Body: "0 1 context canceled", Gone: true}},
		"canceled before the head": {serve: tokens(9), cancel: 5 * ms, want: got{Head: "extproctest: no response from the handler: context canceled", Gone: true}},
		"slow reader, canceled": {serve: func(w http.ResponseWriter, r *http.Request) {
			for { // until a write fails
				if _, err := w.Write(make([]byte, 4000)); err != nil {
					return
				}
			}
		}, read: 1, want: got{Head: "200 -1 application/octet-stream", Body: strings.Repeat("\x00", 512) + " closed", Gone: true}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var mu sync.Mutex
				var g got
				tr := extproctest.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if r.Context().Value(key{}) != nil || r.URL.Host != "" || r.Host != "model" || r.RequestURI == "" {
						t.Errorf("request %+v", r)
					}
					tt.serve(w, r)
					mu.Lock()
					defer mu.Unlock()
					g.Gone = r.Context().Err() != nil
				}))
				ctx, cancel := context.WithCancel(context.WithValue(t.Context(), key{}, 1))
				defer cancel()
				if tt.cancel > 0 {
					time.AfterFunc(tt.cancel, cancel)
				}
				req, _ := http.NewRequest("GET", "http://model/", nil)
				if tt.req != nil {
					req = tt.req()
				}
				res, err := tr.RoundTrip(req.WithContext(ctx))
				var head, body string
				if err != nil {
					head = err.Error()
				} else {
					head = fmt.Sprint(res.StatusCode, " ", res.ContentLength, " ", res.Header.Get("Content-Type"))
					buf := make([]byte, 512)
					for i := 0; ; i++ {
						if tt.read > 0 && i == tt.read {
							res.Body.Close()
							body += "closed"
							break
						}
						n, err := res.Body.Read(buf)
						if n > 0 {
							body += string(buf[:n]) + " "
						}
						if err != nil {
							if body += err.Error(); len(res.Trailer) > 0 {
								body += fmt.Sprint(" ", res.Trailer)
							}
							break
						}
					}
				}
				synctest.Wait()
				mu.Lock()
				defer mu.Unlock()
				g.Head, g.Body = head, body
				if diff := cmp.Diff(tt.want, g); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
			})
		})
	}
}

type key struct{}

// TestReverseProxy: as the transport of a small real proxy, between sockets.
func TestReverseProxy(t *testing.T) {
	gone := make(chan struct{}, 1)
	next := make(chan struct{}, 1)
	model := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		w.Header().Set("Trailer", "X-Usage")
		fmt.Fprintf(w, "%s\n", b)
		w.(http.Flusher).Flush()
		select {
		case <-next:
		case <-r.Context().Done():
			gone <- struct{}{}
			return
		}
		io.WriteString(w, "end\n")
		w.Header().Set("X-Usage", "7")
	}))
	defer model.Close()
	target, _ := url.Parse(model.URL)
	entries := make(chan extproctest.Entry, 1)
	evictNow := make(chan struct{}, 1)
	envoy := &extproctest.Envoy{
		Config:    mode(&modes{RequestBodyMode: buffered, ResponseTrailerMode: send}),
		AccessLog: func(e extproctest.Entry) { entries <- e },
		Errorf:    t.Errorf,
		Server: serverFunc(func(st stream) error {
			in := make(chan *request)
			go func() {
				defer close(in)
				for {
					r, err := st.Recv()
					if err != nil {
						return
					}
					in <- r
				}
			}()
			for {
				select {
				case r, ok := <-in:
					if !ok {
						return nil
					}
					st.Send(answer(r, nil))
				case <-evictNow:
					st.Send(evict())
				}
			}
		}),
	}
	proxy := httptest.NewServer(&httputil.ReverseProxy{
		Transport:     envoy,
		FlushInterval: -1,
		ErrorLog:      log.New(io.Discard, "", 0),
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(target) },
	})
	defer proxy.Close()

	ask := func() (*http.Response, *bufio.Reader) {
		res, err := http.Post(proxy.URL+"/v1", "text/plain", strings.NewReader("hello"))
		if err != nil {
			t.Fatal(err)
		}
		r := bufio.NewReader(res.Body)
		if line, err := r.ReadString('\n'); line != "hello\n" || err != nil {
			t.Fatalf("first line %q, %v", line, err)
		}
		return res, r
	}

	res, r := ask()
	next <- struct{}{}
	rest, err := io.ReadAll(r)
	if string(rest) != "end\n" || err != nil || res.Trailer.Get("X-Usage") != "7" {
		t.Errorf("rest %q, %v, trailer %v", rest, err, res.Trailer)
	}
	if e := <-entries; e.Details != "via_upstream" || !e.Complete || e.Bytes != 10 {
		t.Errorf("entry %+v", e)
	}

	_, r = ask()
	evictNow <- struct{}{}
	if rest, err := io.ReadAll(r); len(rest) != 0 || err != io.ErrUnexpectedEOF {
		t.Errorf("after the eviction: %q, %v", rest, err)
	}
	<-gone
	if e := <-entries; e.Details != "evicted_by_test" || e.Complete || e.Code != 200 {
		t.Errorf("entry %+v", e)
	}

	res, _ = ask()
	res.Body.Close() // the client leaves
	<-gone
	if e := <-entries; e.Details != "downstream_remote_disconnect" || e.Complete {
		t.Errorf("entry %+v", e)
	}
}

package extproctest_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corepb "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typepb "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/extevict/extevict/extproc/extproctest"
)

type (
	request  = extprocpb.ProcessingRequest
	response = extprocpb.ProcessingResponse
	common   = extprocpb.CommonResponse
	stream   = extprocpb.ExternalProcessor_ProcessServer
	config   = filterpb.ExternalProcessor
	modes    = filterpb.ProcessingMode
)

const (
	skip     = filterpb.ProcessingMode_SKIP
	send     = filterpb.ProcessingMode_SEND
	streamed = filterpb.ProcessingMode_STREAMED
	buffered = filterpb.ProcessingMode_BUFFERED
	partial  = filterpb.ProcessingMode_BUFFERED_PARTIAL
	duplex   = filterpb.ProcessingMode_FULL_DUPLEX_STREAMED
)

type serverFunc func(stream) error

func (f serverFunc) Process(st stream) error { return f(st) }

// kind names a message: reqH, reqB, reqT, resH, resB or resT.
func kind(r *request) string {
	switch r.Request.(type) {
	case *extprocpb.ProcessingRequest_RequestHeaders:
		return "reqH"
	case *extprocpb.ProcessingRequest_RequestBody:
		return "reqB"
	case *extprocpb.ProcessingRequest_RequestTrailers:
		return "reqT"
	case *extprocpb.ProcessingRequest_ResponseHeaders:
		return "resH"
	case *extprocpb.ProcessingRequest_ResponseBody:
		return "resB"
	}
	return "resT"
}

// describe is kind and what is in a message, "." for its end.
func describe(r *request) string {
	end := func(eos bool) string {
		if eos {
			return "."
		}
		return ""
	}
	switch m := r.Request.(type) {
	case *extprocpb.ProcessingRequest_RequestHeaders:
		return "reqH" + end(m.RequestHeaders.EndOfStream)
	case *extprocpb.ProcessingRequest_ResponseHeaders:
		return "resH" + end(m.ResponseHeaders.EndOfStream)
	case *extprocpb.ProcessingRequest_RequestBody:
		return fmt.Sprintf("reqB(%s)%s", m.RequestBody.Body, end(m.RequestBody.EndOfStream))
	case *extprocpb.ProcessingRequest_ResponseBody:
		return fmt.Sprintf("resB(%s)%s", m.ResponseBody.Body, end(m.ResponseBody.EndOfStream))
	}
	return kind(r)
}

// answer is the reply to r with c in it, nil for none.
func answer(r *request, c *common) *response {
	switch kind(r) {
	case "reqH":
		return &response{Response: &extprocpb.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocpb.HeadersResponse{Response: c}}}
	case "reqB":
		return &response{Response: &extprocpb.ProcessingResponse_RequestBody{RequestBody: &extprocpb.BodyResponse{Response: c}}}
	case "reqT":
		return &response{Response: &extprocpb.ProcessingResponse_RequestTrailers{RequestTrailers: &extprocpb.TrailersResponse{HeaderMutation: c.GetHeaderMutation()}}}
	case "resH":
		return &response{Response: &extprocpb.ProcessingResponse_ResponseHeaders{ResponseHeaders: &extprocpb.HeadersResponse{Response: c}}}
	case "resB":
		return &response{Response: &extprocpb.ProcessingResponse_ResponseBody{ResponseBody: &extprocpb.BodyResponse{Response: c}}}
	}
	return &response{Response: &extprocpb.ProcessingResponse_ResponseTrailers{ResponseTrailers: &extprocpb.TrailersResponse{HeaderMutation: c.GetHeaderMutation()}}}
}

// echo is answer for any body mode.
func echo(r *request, full bool) *response {
	if b := r.GetRequestBody(); full && b != nil {
		return answer(r, chunk(string(b.Body), b.EndOfStream))
	}
	if b := r.GetResponseBody(); full && b != nil {
		return answer(r, chunk(string(b.Body), b.EndOfStream))
	}
	return answer(r, nil)
}

func chunk(body string, end bool) *common {
	return &common{BodyMutation: &extprocpb.BodyMutation{Mutation: &extprocpb.BodyMutation_StreamedResponse{
		StreamedResponse: &extprocpb.StreamedBodyResponse{Body: []byte(body), EndOfStream: end}}}}
}

func body(b string) *common {
	return &common{BodyMutation: &extprocpb.BodyMutation{Mutation: &extprocpb.BodyMutation_Body{Body: []byte(b)}}}
}

func header(name, value string) *corepb.HeaderValueOption {
	return &corepb.HeaderValueOption{Header: &corepb.HeaderValue{Key: name, RawValue: []byte(value)}}
}

func headers(set ...*corepb.HeaderValueOption) *common {
	return &common{HeaderMutation: &extprocpb.HeaderMutation{SetHeaders: set}}
}

func evict() *response {
	return &response{Response: &extprocpb.ProcessingResponse_ImmediateResponse{ImmediateResponse: &extprocpb.ImmediateResponse{
		Status:  &typepb.HttpStatus{Code: typepb.StatusCode_TooManyRequests},
		Headers: headers(header("content-type", "application/json"), header("x-evicted", "yes")).HeaderMutation,
		Body:    []byte(`{"error":1}`),
		Details: "evicted by test",
	}}}
}

var errServer = status.Error(codes.Unavailable, "no more")

// A server answers all messages but those that on takes, which returns true then, or an error to end Process; io.EOF is nil.
// It writes down what it receives.
type server struct {
	full bool // FULL_DUPLEX_STREAMED
	on   func(st stream, r *request, n int) (bool, error)

	mu   sync.Mutex
	seen []string
}

func (s *server) note(what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen = append(s.seen, what)
}

func (s *server) Process(st stream) error {
	n := map[string]int{}
	for {
		r, err := st.Recv()
		switch {
		case err == io.EOF:
			s.note("EOF")
			return nil
		case err != nil:
			s.note(status.Code(err).String())
			return nil
		}
		s.note(describe(r))
		if s.on != nil {
			taken, err := s.on(st, r, n[kind(r)])
			n[kind(r)]++
			switch {
			case err == io.EOF:
				return nil
			case err != nil:
				return err
			case taken:
				continue
			}
		}
		st.Send(echo(r, s.full))
	}
}

// at makes an on that does something at the n-th message of a kind.
func at(what string, n int, do func(st stream, r *request) (bool, error)) func(stream, *request, int) (bool, error) {
	return func(st stream, r *request, i int) (bool, error) {
		if kind(r) == what && i == n {
			return do(st, r)
		}
		return false, nil
	}
}

func sends(m ...*response) func(stream, *request) (bool, error) {
	return func(st stream, _ *request) (bool, error) {
		for _, m := range m {
			st.Send(m)
		}
		return true, nil
	}
}

func replies(c *common) func(stream, *request) (bool, error) {
	return func(st stream, r *request) (bool, error) { return true, st.Send(answer(r, c)) }
}

func returns(err error) func(stream, *request) (bool, error) {
	return func(stream, *request) (bool, error) { return false, err }
}

func silent(stream, *request) (bool, error) { return true, nil }

// An outcome is a request as all of its parties saw it.
type outcome struct {
	Client   string // status and body, and how it ended if not well
	Server   string // the messages and errors it received
	Upstream string // "done", "canceled", "" if not called
	Log      string // code, details, Process's error; "whole" or "cut"
	Faults   int    // told to Errorf
}

// A scene is one request through an Envoy.
type scene struct {
	envoy    extproctest.Envoy
	model    http.HandlerFunc
	upstream http.RoundTripper    // instead of model
	req      func() *http.Request // GET http://model/v1 if nil
	client   func(*http.Response, error) string
	cancel   time.Duration // the client leaves then

	faults []string
	header http.Header // what the client got
	took   time.Duration
	entry  extproctest.Entry
}

// play runs the scene in a bubble: no goroutine may be left.
func (s *scene) play(t *testing.T) (o outcome) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		s.envoy.Upstream = extproctest.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			s.model(w, r)
			mu.Lock()
			defer mu.Unlock()
			o.Upstream = "done"
			if r.Context().Err() != nil {
				o.Upstream = "canceled"
			}
		}))
		if s.upstream != nil {
			s.envoy.Upstream = s.upstream
		}
		s.envoy.Errorf = func(format string, args ...any) { s.faults = append(s.faults, fmt.Sprintf(format, args...)) }
		logged := make(chan extproctest.Entry, 2)
		s.envoy.AccessLog = func(e extproctest.Entry) { logged <- e }
		req, _ := http.NewRequest("GET", "http://model/v1", nil)
		if s.req != nil {
			req = s.req()
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		if s.cancel > 0 {
			time.AfterFunc(s.cancel, cancel)
		}
		start := time.Now()
		res, err := s.envoy.RoundTrip(req.WithContext(ctx))
		if res != nil {
			s.header = res.Header
		}
		read := s.client
		if read == nil {
			read = readAll
		}
		o.Client = read(res, err)
		s.took = time.Since(start)
		e := <-logged
		time.Sleep(time.Second) // for the client's and the upstream's ends
		synctest.Wait()
		if len(logged) > 0 {
			t.Errorf("logged twice: %v", <-logged)
		}
		s.entry = e
		o.Log = fmt.Sprint(e.Code, " ", e.Details)
		if e.Err != nil {
			o.Log += " " + status.Code(e.Err).String()
		}
		if e.Panic != nil {
			o.Log += fmt.Sprint(" panic ", e.Panic)
		}
		if e.Complete {
			o.Log += " whole"
		} else {
			o.Log += " cut"
		}
		if srv, ok := s.envoy.Server.(*server); ok {
			srv.mu.Lock()
			o.Server = strings.Join(srv.seen, " ")
			srv.mu.Unlock()
		}
		o.Faults = len(s.faults)
		mu.Lock()
		defer mu.Unlock()
	})
	return o
}

func readAll(res *http.Response, err error) string {
	if err != nil {
		return end(err)
	}
	b, err := io.ReadAll(res.Body)
	res.Body.Close()
	s := fmt.Sprint(res.StatusCode, " ", string(b))
	if err != nil {
		s += " " + end(err)
	}
	for _, k := range slices.Sorted(maps.Keys(res.Trailer)) {
		if v := res.Trailer.Get(k); v != "" {
			s += fmt.Sprint(" ", k, "=", v)
		}
	}
	return s
}

func end(err error) string {
	switch {
	case errors.Is(err, extproctest.ErrReset):
		return "reset"
	case errors.Is(err, context.Canceled):
		return "canceled"
	}
	return err.Error()
}

// tokens is a model that sends n tokens, one each 10 ms, after 10 ms.
func tokens(n int) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range n {
			select {
			case <-time.After(10 * time.Millisecond):
			case <-r.Context().Done():
				return
			}
			fmt.Fprintf(w, "%d", i)
			w.(http.Flusher).Flush()
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-r.Context().Done():
		}
	}
}

// withTrailer adds a trailer to a model.
func withTrailer(model http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Trailer", "X-Usage")
		model(w, r)
		w.Header().Set("X-Usage", "7")
	}
}

// whole is a model that answers at once.
func whole(w http.ResponseWriter, r *http.Request) {
	io.Copy(io.Discard, r.Body)
	io.WriteString(w, "all of it")
}

func mode(m *modes) *config {
	return &config{ProcessingMode: m, MessageTimeout: durationpb.New(time.Minute)}
}

// upload is a POST whose body comes in parts, 10 ms apart.
func upload(parts ...string) func() *http.Request {
	return func() *http.Request { // in the bubble
		pr, pw := io.Pipe()
		go func() {
			for _, p := range parts {
				if _, err := io.WriteString(pw, p); err != nil {
					return
				}
				time.Sleep(10 * time.Millisecond)
			}
			pw.Close()
		}()
		req, _ := http.NewRequest("POST", "http://model/v1", pr)
		return req
	}
}

func post(body string) func() *http.Request {
	return func() *http.Request {
		req, _ := http.NewRequest("POST", "http://model/v1", strings.NewReader(body))
		return req
	}
}

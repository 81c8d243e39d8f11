package extproc_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	filterpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/extproc/extproctest"
)

// noise counts what a server would have logged as an error.
type noise struct {
	mu    sync.Mutex
	lines []string
}

func (n *noise) log(format string, args ...any) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.lines = append(n.lines, fmt.Sprintf(format, args...))
}

type streamKey struct{}

// The habits that ext_proc servers have with their stream, as nine of them were seen to.
// after ends what may outlive Process.
var habits = map[string]func(n *noise, after *sync.WaitGroup) serverFunc{
	"returns nil on io.EOF": func(n *noise, _ *sync.WaitGroup) serverFunc {
		return func(s process) error {
			for {
				r, err := s.Recv()
				if err == io.EOF {
					return nil
				}
				if err != nil {
					return status.Errorf(codes.Unknown, "cannot receive stream request: %v", err)
				}
				if err := s.Send(reply(r)); err != nil {
					return err
				}
			}
		}
	},
	"looks at the code": looksAtTheCode,
	"compares with the status error": func(n *noise, _ *sync.WaitGroup) serverFunc {
		return func(s process) error {
			for {
				r, err := s.Recv()
				if errors.Is(err, io.EOF) || errors.Is(err, status.Error(codes.Canceled, context.Canceled.Error())) {
					return nil
				}
				if err != nil {
					n.log("recv: %v", err)
					return err
				}
				s.Send(reply(r))
			}
		}
	},
	"looks for the text": func(n *noise, _ *sync.WaitGroup) serverFunc {
		return func(s process) error {
			for {
				r, err := s.Recv()
				if err != nil {
					if text := err.Error(); text != "EOF" && text != "rpc error: code = Canceled desc = context canceled" {
						n.log("recv: %v", err)
					}
					return nil
				}
				s.Send(reply(r))
			}
		}
	},
	"looks at the context first": func(n *noise, _ *sync.WaitGroup) serverFunc {
		return func(s process) error {
			for {
				select {
				case <-s.Context().Done():
					return s.Context().Err()
				default:
				}
				r, err := s.Recv()
				if err != nil {
					return err
				}
				if err := s.Send(reply(r)); err != nil {
					return err
				}
			}
		}
	},
	"logs when Send fails": func(n *noise, _ *sync.WaitGroup) serverFunc {
		return func(s process) error {
			for {
				r, err := s.Recv()
				if err != nil {
					return nil
				}
				time.Sleep(time.Millisecond) // the client leaves, or an abort comes, meanwhile
				if err := s.Send(reply(r)); err != nil {
					n.log("send: %v", err)
				}
			}
		}
	},
	"one reader that outlives Process": func(n *noise, after *sync.WaitGroup) serverFunc {
		return func(s process) error {
			type msg struct {
				r   *request
				err error
			}
			msgs := make(chan msg, 1)
			after.Go(func() {
				defer close(msgs)
				for {
					r, err := s.Recv()
					msgs <- msg{r, err}
					if err != nil {
						return
					}
				}
			})
			for {
				select {
				case <-s.Context().Done():
					go func() { // keep the reader going
						for range msgs {
						}
					}()
					return nil
				case m := <-msgs:
					if m.err != nil {
						return nil
					}
					if err := s.Send(reply(m.r)); err != nil {
						n.log("send: %v", err)
					}
				}
			}
		}
	},
	"a goroutine for each Recv": func(n *noise, after *sync.WaitGroup) serverFunc {
		return func(s process) error {
			for {
				var r *request
				var err error
				done := make(chan struct{})
				after.Go(func() { defer close(done); r, err = s.Recv() })
				select {
				case <-done:
				case <-s.Context().Done():
					return nil
				}
				if err != nil {
					return nil
				}
				if err := s.Send(reply(r)); err != nil {
					n.log("send: %v", err)
				}
			}
		}
	},
	"a goroutine for each message": func(n *noise, after *sync.WaitGroup) serverFunc {
		return func(s process) error {
			for {
				r, err := s.Recv()
				if err != nil {
					return nil
				}
				turn := make(chan struct{})
				after.Go(func() {
					if e := s.Send(reply(r)); e != nil && status.Code(e) != codes.Canceled {
						n.log("send: %v", e)
					}
					close(turn)
				})
				if r.GetResponseBody() == nil {
					<-turn
				}
			}
		}
	},
	"RecvMsg, and the stream in a context": func(n *noise, _ *sync.WaitGroup) serverFunc {
		return func(s process) error {
			ctx := context.WithValue(s.Context(), streamKey{}, s)
			for {
				var r request
				if err := s.RecvMsg(&r); err != nil {
					if err != io.EOF && status.Code(err) != codes.Canceled {
						n.log("recv: %v", err)
					}
					return nil
				}
				if err := ctx.Value(streamKey{}).(process).SendMsg(reply(&r)); err != nil {
					n.log("send: %v", err)
				}
			}
		}
	},
	"a recovery interceptor around it": func(n *noise, after *sync.WaitGroup) serverFunc {
		next := looksAtTheCode(n, after)
		return func(s process) (err error) {
			defer func() {
				if p := recover(); p != nil {
					n.log("panic: %v", p)
				}
			}()
			return next(s)
		}
	},
	"works without looking": func(n *noise, _ *sync.WaitGroup) serverFunc {
		return func(s process) error {
			for {
				r, err := s.Recv()
				if err != nil {
					return nil
				}
				if r.GetRequestHeaders() != nil {
					time.Sleep(20 * time.Millisecond)
				}
				if b := r.GetResponseBody(); b != nil && strings.Contains(string(b.Body), "3") {
					time.Sleep(3 * time.Second)
				}
				if err := s.Send(reply(r)); err != nil {
					n.log("send: %v", err)
				}
			}
		}
	},
	"tracks by itself too": func(n *noise, _ *sync.WaitGroup) serverFunc {
		return func(s process) error {
			for {
				r, err := s.Recv()
				if err != nil {
					return nil
				}
				if r.GetRequestHeaders() != nil {
					tracker(s.Context()).TrackRequests(s.Context(), abort.Request{Priority: -1, Endpoint: "own"})
				}
				s.Send(reply(r))
			}
		}
	},
}

func looksAtTheCode(n *noise, _ *sync.WaitGroup) serverFunc {
	return func(s process) error {
		for {
			r, err := s.Recv()
			if status.Code(err) == codes.Canceled || err == io.EOF {
				return nil
			}
			if err != nil {
				n.log("recv: %v", err)
				return err
			}
			if err := s.Send(reply(r)); err != nil {
				n.log("send: %v", err)
			}
		}
	}
}

type trackerKey struct{}

// tracker is how a server that has one gets at the evictor here.
func tracker(ctx context.Context) extproc.Tracker { return ctx.Value(trackerKey{}).(extproc.Tracker) }

// withTracker puts the evictor where tracker finds it, as a stream decorator would.
func withTracker(next extprocpb.ExternalProcessorServer, ev *evictor.Evictor) serverFunc {
	return func(s process) error {
		return next.Process(contextStream{s, context.WithValue(s.Context(), trackerKey{}, ev)})
	}
}

type contextStream struct {
	process
	ctx context.Context
}

func (s contextStream) Context() context.Context { return s.ctx }

// seen is what a client got and what its server made of it.
type seen struct {
	Status  int
	Body    string
	Reset   bool
	Victims int
	Left    int // entries
	Noise   []string
}

// visit runs one request with a slow SSE upstream through srv behind the fake Envoy:
// 100 ms to the headers, then an event each 100 ms. do happens after at.
func visit(t *testing.T, n *noise, wrap func(*evictor.Evictor) extprocpb.ExternalProcessorServer, at time.Duration, do string) (s seen) {
	synctest.Test(t, func(t *testing.T) {
		var ev evictor.Evictor
		proxy := &extproctest.Envoy{
			Server: withTracker(wrap(&ev), &ev),
			Upstream: extproctest.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				time.Sleep(100 * time.Millisecond)
				w.Header().Set("content-type", "text/event-stream")
				for i := range 6 {
					fmt.Fprintf(w, "data: %d\n\n", i)
					w.(http.Flusher).Flush()
					select {
					case <-time.After(100 * time.Millisecond):
					case <-r.Context().Done():
						return
					}
				}
			})),
			Config: &filterpb.ExternalProcessor{
				ProcessingMode: &filterpb.ProcessingMode{ResponseHeaderMode: filterpb.ProcessingMode_SEND, ResponseBodyMode: streamed},
				MessageTimeout: durationpb.New(time.Minute),
			},
			Errorf: t.Errorf,
		}
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		time.AfterFunc(at, func() {
			switch do {
			case "evict":
				vs, err := ev.Evict(context.Background(), evictor.Demand{N: 9, Reason: abort.Preempted})
				if err != nil {
					t.Error(err)
				}
				s.Victims = len(vs)
			case "leave":
				cancel()
			}
		})
		req, _ := http.NewRequestWithContext(ctx, "GET", "http://x/", nil)
		resp, err := proxy.RoundTrip(req)
		if err == nil {
			s.Status = resp.StatusCode
			var b []byte
			b, err = io.ReadAll(resp.Body)
			s.Body = string(b)
			resp.Body.Close()
		}
		s.Reset = err != nil
		time.Sleep(time.Minute) // for the server
		s.Left = ev.Len()
	})
	s.Noise = n.lines
	return s
}

// errorEvent is the default one.
var errorEvent = "data: " + string(extproc.Response(&abort.Error{Reason: abort.Preempted}, nil).Body) + "\n\n"

// TestHabits: to each of these servers an abort is a client that left. Without one,
// clients get the same bytes with Wrap as without. Invariant 5.
func TestHabits(t *testing.T) {
	describe := func(context.Context, *request) (abort.Request, bool) { return abort.Request{Priority: -1}, true }
	for name, habit := range habits {
		t.Run(name, func(t *testing.T) {
			run := func(at time.Duration, do string, wrapped bool) seen {
				n, after := &noise{}, &sync.WaitGroup{}
				return visit(t, n, func(ev *evictor.Evictor) extprocpb.ExternalProcessorServer {
					next := serverFunc(func(s process) error { return habit(n, after)(s) })
					if !wrapped {
						return next
					}
					return extproc.Wrap(next, extproc.WithTracker(ev, describe))
				}, at, do)
			}
			bare, wrapped := run(time.Hour, "", false), run(time.Hour, "", true)
			if d := cmp.Diff(bare, wrapped); d != "" {
				t.Errorf("bare (-), wrapped (+):\n%s", d)
			}
			if bare.Status != 200 || bare.Reset || len(bare.Body) != len("data: 0\n\n")*6 {
				t.Errorf("bare: %+v", bare)
			}
			for _, at := range []time.Duration{10 * time.Millisecond, 50 * time.Millisecond, 401500 * time.Microsecond} {
				left := run(at, "leave", false)
				got := run(at, "evict", true)
				want := seen{Status: 429, Body: string(extproc.Response(&abort.Error{Reason: abort.Preempted}, nil).Body), Victims: 1, Noise: left.Noise}
				if at > 100*time.Millisecond {
					want = seen{Status: 200, Body: left.Body, Reset: true, Victims: 1, Noise: left.Noise}
				}
				// A server that owed a reply had an error event put into it.
				if rest, ok := strings.CutPrefix(got.Body, left.Body); ok && rest == errorEvent {
					want.Body = got.Body
				}
				if len(got.Noise) == 0 { // quieter than a client that left is fine
					want.Noise = nil
				}
				if d := cmp.Diff(want, got); d != "" {
					t.Errorf("evicted after %v (-want +got):\n%s", at, d)
				}
			}
		})
	}
}

// TestEarlyEnd: servers that end their stream early, or answer by themselves, are not
// evictable from then on.
func TestEarlyEnd(t *testing.T) {
	describe := func(context.Context, *request) (abort.Request, bool) { return abort.Request{Priority: -1}, true }
	for name, c := range map[string]struct {
		serve  serverFunc
		status int
	}{
		"returns nil": {func(s process) error { r, _ := s.Recv(); return s.Send(reply(r)) }, 200},
		"answers":     {func(s process) error { s.Recv(); return s.Send(unavailable()) }, 503},
	} {
		got := visit(t, &noise{}, func(ev *evictor.Evictor) extprocpb.ExternalProcessorServer {
			return extproc.Wrap(c.serve, extproc.WithTracker(ev, describe))
		}, 50*time.Millisecond, "evict")
		if got.Status != c.status || got.Victims != 0 || got.Reset || got.Left != 0 {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// TestOrderOfInterceptors: a server in a chain with recovery outside of it: a panic
// is recovered there, once the request is settled, and what an abort makes of Process
// is a normal end.
func TestOrderOfInterceptors(t *testing.T) {
	for _, panics := range []bool{false, true} {
		n := &noise{}
		intercept := extproc.StreamInterceptor()
		var h *abort.Handle
		got := visit(t, n, func(ev *evictor.Evictor) extprocpb.ExternalProcessorServer {
			next := serverFunc(func(s process) error {
				h = handle(s)
				ev.TrackRequests(s.Context(), abort.Request{Priority: -1})
				if panics {
					panic("own")
				}
				return echo(streamed)(s)
			})
			return serverFunc(func(s process) (err error) {
				defer func() {
					if p := recover(); p != nil {
						n.log("recovered: %v", p)
						err = status.Error(codes.Internal, "panic")
					}
				}()
				return intercept(next, s, &grpc.StreamServerInfo{FullMethod: extprocpb.ExternalProcessor_Process_FullMethodName},
					func(srv any, ss grpc.ServerStream) error {
						return next(&grpc.GenericServerStream[request, response]{ServerStream: ss})
					})
			})
		}, 50*time.Millisecond, "evict")
		want := seen{Status: 429, Body: string(extproc.Response(&abort.Error{Reason: abort.Preempted}, nil).Body), Victims: 1}
		outcome := abort.Aborted
		if panics {
			want, outcome = seen{Status: 500, Noise: []string{"recovered: own"}}, abort.Closed
		}
		if d := cmp.Diff(want, got); d != "" || h.Outcome() != outcome {
			t.Errorf("panics: %v, outcome %v (-want +got):\n%s", panics, h.Outcome(), d)
		}
	}
}

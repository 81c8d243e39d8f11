package extproc_test

import (
	"context"
	"errors"
	"io"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/extproc/extproctest"
)

// start serves a new stream; the returned function waits for Process.
func start(srv extprocpb.ExternalProcessorServer, window int) (*extproctest.Stream, func() error) {
	st := extproctest.NewStream(context.Background(), window)
	done := make(chan error, 1)
	go func() { done <- st.Serve(srv) }()
	return st, func() error { return <-done }
}

// envoy does what Envoy does with replies: it reads them until an ImmediateResponse
// and hangs up a millisecond later. It returns what it read.
func envoy(st *extproctest.Stream) (wire []*response) {
	for {
		select {
		case r := <-st.Replies():
			wire = append(wire, r)
			if r.GetImmediateResponse() != nil {
				select {
				case <-time.After(time.Millisecond):
				case <-st.Context().Done():
				}
				st.HangUp()
				return wire
			}
		case <-st.Context().Done():
			return wire
		}
	}
}

func answers(wire []*response) (n int) {
	for _, r := range wire {
		if r.GetImmediateResponse() != nil {
			n++
		}
	}
	return n
}

// The three ways to receive.
var recvs = map[string]func(*extproc.Stream) error{
	"Recv":        func(s *extproc.Stream) error { _, err := s.Recv(); return err },
	"RecvMsg":     func(s *extproc.Stream) error { return s.RecvMsg(new(request)) },
	"RecvOrAbort": func(s *extproc.Stream) error { _, err := s.RecvOrAbort(); return err },
}

// TestLooksLikeAClientThatLeft compares what a server sees of an abort with what it
// sees of a client that leaves.
func TestLooksLikeAClientThatLeft(t *testing.T) {
	type sight struct {
		Text, Again string
		Code        codes.Code
		Is, EOF     bool
		Ctx         error
	}
	look := func(t *testing.T, recv func(*extproc.Stream) error, abortIt bool) (s sight) {
		synctest.Test(t, func(t *testing.T) {
			var h *abort.Handle
			st, wait := start(extproc.Handler(func(st *extproc.Stream) error {
				h = handle(st)
				if err := recv(st); err != nil {
					t.Errorf("first message: %v", err)
				}
				err := recv(st)
				s = sight{
					Text: err.Error(), Again: recv(st).Error(), Code: status.Code(err), EOF: err == io.EOF, Ctx: st.Context().Err(),
					Is: errors.Is(err, status.Error(codes.Canceled, "context canceled")) && !errors.Is(err, status.Error(codes.Canceled, "other")),
				}
				e, ok := errors.AsType[*abort.Error](err)
				if ok != abortIt || ok && e.Reason != "because" {
					t.Errorf("unwraps to %v, aborted: %v", e, abortIt)
				}
				if cause, ok := errors.AsType[*abort.Error](context.Cause(st.Context())); ok != abortIt || cause != e {
					t.Errorf("the context's cause is %v, the error's %v", cause, e)
				}
				return nil
			}), 10)
			go envoy(st)
			st.Push(requestHeaders(streamed))
			time.Sleep(time.Second)
			if abortIt {
				h.Abort("because")
			} else {
				st.HangUp()
			}
			wait()
		})
		return s
	}
	for name, recv := range recvs {
		t.Run(name, func(t *testing.T) {
			left, aborted := look(t, recv, false), look(t, recv, true)
			if d := cmp.Diff(left, aborted, cmp.Comparer(func(a, b error) bool { return a == b })); d != "" {
				t.Errorf("a client that left (-), an abort (+):\n%s", d)
			}
			if left.Code != codes.Canceled || !left.Is || left.Ctx != context.Canceled {
				t.Errorf("a client that left: %+v", left)
			}
		})
	}
}

// TestWhenRecvReturns: a Recv that starts after the abort fails at once; one that
// waits fails at the next message, which it drops, or when the proxy hangs up;
// RecvOrAbort does not wait for the proxy at all.
func TestWhenRecvReturns(t *testing.T) {
	const hangUpAfter, pushAfter = 10 * time.Millisecond, 4 * time.Millisecond
	for _, c := range []struct {
		name      string
		recv      string
		busy      bool // the server is at work when the abort comes
		crossing  bool // a message crosses the abort
		wantAfter time.Duration
	}{
		{"waiting", "Recv", false, false, hangUpAfter},
		{"waiting, message", "Recv", false, true, pushAfter},
		{"waiting, RecvMsg", "RecvMsg", false, false, hangUpAfter},
		{"waiting, RecvMsg, message", "RecvMsg", false, true, pushAfter},
		{"busy", "Recv", true, false, 0},
		{"busy, RecvMsg", "RecvMsg", true, false, 0},
		{"own loop", "RecvOrAbort", false, false, 0},
		{"own loop, message", "RecvOrAbort", false, true, 0},
		{"own loop, busy", "RecvOrAbort", true, true, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var after time.Duration
				st, wait := start(extproc.Handler(func(s *extproc.Stream) error {
					recvs[c.recv](s)
					at := time.Now().Add(time.Second)
					time.AfterFunc(time.Second, func() { handle(s).Abort(abort.Preempted) })
					if c.busy {
						time.Sleep(2 * time.Second)
						at = time.Now()
					}
					if err := recvs[c.recv](s); err == nil {
						t.Error("a message that crossed the abort was delivered")
					}
					after = time.Since(at)
					return nil
				}), 10)
				go func() {
					<-st.Replies()
					time.Sleep(hangUpAfter)
					if !c.busy {
						st.HangUp()
					}
				}()
				st.Push(requestHeaders(streamed))
				if c.crossing {
					go func() { time.Sleep(time.Second + pushAfter); st.Push(responseHeaders()) }()
				}
				wait()
				time.Sleep(time.Minute) // the proxy's goroutines
				if after != c.wantAfter {
					t.Errorf("after %v, want %v", after, c.wantAfter)
				}
			})
		})
	}
}

// TestEOF is a half-close: the request is Closed, and what is owed still goes out.
func TestEOF(t *testing.T) {
	for name, recv := range recvs {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				st, wait := start(extproc.Handler(func(s *extproc.Stream) error {
					recv(s)
					if err := recv(s); err != io.EOF {
						t.Errorf("Recv: %v", err)
					}
					if err := recv(s); err != io.EOF {
						t.Errorf("Recv again: %v", err)
					}
					if o := handle(s).Outcome(); o != abort.Closed {
						t.Errorf("outcome %v", o)
					}
					if handle(s).Abort(abort.Preempted) {
						t.Error("aborted after the end")
					}
					if err := s.Context().Err(); err != nil {
						t.Errorf("context: %v", err)
					}
					return s.Send(reply(requestHeaders(none)))
				}), 10)
				st.Push(requestHeaders(streamed))
				st.HalfClose()
				if err := wait(); err != nil || len(st.Replies()) != 1 {
					t.Errorf("Process: %v, %d replies", err, len(st.Replies()))
				}
			})
		})
	}
}

// TestProxies puts a server in each of its places before proxies that misbehave once
// a request is aborted. In all of them Process ends within a bound, with what design
// and grpc demand, and the client's answer is on its way if there is room for it.
func TestProxies(t *testing.T) {
	servers := map[string]func(*extproc.Stream){ // where the abort finds it
		"in Recv":        func(s *extproc.Stream) { s.Recv() },
		"in RecvOrAbort": func(s *extproc.Stream) { s.RecvOrAbort() },
		"at work":        func(s *extproc.Stream) { time.Sleep(1500 * time.Millisecond) },
		"in Send elsewhere": func(s *extproc.Stream) {
			for range 4 {
				go s.Send(reply(requestHeaders(streamed)))
			}
			<-s.Context().Done()
		},
	}
	proxies := map[string]struct {
		window int
		do     func(*extproctest.Stream) // once the abort is decided
		server string                    // only this one
		code   codes.Code
		answer bool
		within time.Duration // of the abort, and of the server's return
	}{
		"hangs up":    {window: 10, do: func(st *extproctest.Stream) { time.Sleep(time.Millisecond); st.HangUp() }, answer: true, within: time.Millisecond},
		"half-closes": {window: 10, do: func(st *extproctest.Stream) { time.Sleep(time.Millisecond); st.HalfClose() }, answer: true, within: time.Millisecond},
		"goes on sending": {window: 10, do: func(st *extproctest.Stream) {
			for st.Push(responseHeaders()) {
				time.Sleep(time.Millisecond)
			}
		}, answer: true, within: time.Second},
		"stops reading":        {window: 0, do: func(*extproctest.Stream) {}, server: "at work", code: codes.Aborted, within: time.Second},
		"stops reading, Sends": {window: 0, do: func(*extproctest.Stream) {}, server: "in Send elsewhere", code: codes.Aborted, within: time.Second},
		"vanishes":             {window: 0, do: func(st *extproctest.Stream) { st.HangUp() }, within: 0},
	}
	for pname, p := range proxies {
		for sname, server := range servers {
			if p.server != "" && p.server != sname || p.window > 0 && sname == "in Send elsewhere" {
				continue
			}
			t.Run(pname+"/"+sname, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var returned time.Time
					handles := make(chan *abort.Handle, 1)
					st, wait := start(extproc.Handler(func(s *extproc.Stream) error {
						s.Recv()
						handles <- handle(s)
						server(s)
						returned = time.Now()
						return errors.New("the server's own")
					}), p.window)
					st.Push(requestHeaders(streamed))
					h := <-handles
					time.Sleep(time.Second)
					h.Abort(abort.Preempted)
					aborted := time.Now()
					var proxy sync.WaitGroup
					defer proxy.Wait()
					proxy.Go(func() { p.do(st) })
					err := wait()
					limit := aborted
					if returned.After(limit) {
						limit = returned
					}
					if took := time.Since(limit); took > p.within {
						t.Errorf("Process returned %v after the abort and the server's return, want %v", took, p.within)
					}
					if status.Code(err) != p.code {
						t.Errorf("Process returned %v, want code %v", err, p.code)
					}
					if got := len(st.Replies()) > 0; got != p.answer {
						t.Errorf("answer on the wire: %v", got)
					}
					select {
					case <-h.Done():
					default:
						t.Error("not Done")
					}
				})
			})
		}
	}
}

// TestBusyServer: the client is answered at once although the server does not look
// at its context for seconds.
func TestBusyServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		handles := make(chan *abort.Handle, 1)
		st, wait := start(extproc.Wrap(serverFunc(func(s process) error {
			s.Recv()
			handles <- handle(s)
			time.Sleep(time.Minute)
			return s.Send(reply(requestHeaders(streamed)))
		})), 10)
		st.Push(requestHeaders(streamed))
		h := <-handles
		began := time.Now()
		h.Abort(abort.Preempted)
		if n := answers(envoy(st)); n != 1 {
			t.Errorf("%d answers", n)
		}
		<-h.Done()
		if d := time.Since(began); d > time.Millisecond {
			t.Errorf("answered and let go after %v", d)
		}
		if err := wait(); err != nil {
			t.Errorf("Process: %v", err)
		}
	})
}

// TestOwnEnds: a server's early return, error, panic and own answer keep their
// meaning, settle the request, and leave nothing to abort.
func TestOwnEnds(t *testing.T) {
	own := errors.New("own")
	for _, c := range []struct {
		name  string
		end   func(process) error
		err   error
		panic any
		sends int
	}{
		{"returns nil", func(process) error { return nil }, nil, nil, 0},
		{"returns an error", func(process) error { return own }, own, nil, 0},
		{"panics", func(process) error { panic("own") }, nil, "own", 0},
		{"answers", func(s process) error { s.Send(immediate("own")); time.Sleep(time.Second); return own }, own, nil, 1},
		{"answers with SendMsg", func(s process) error { s.SendMsg(immediate("own")); time.Sleep(time.Second); return own }, own, nil, 1},
		{"ends the body", func(s process) error {
			s.Send(&response{Response: &extprocpb.ProcessingResponse_ResponseBody{ResponseBody: streamedBody("x", true)}})
			time.Sleep(time.Second)
			return own
		}, own, nil, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var h *abort.Handle
				var ctx context.Context
				var outcomes []abort.Outcome
				srv := extproc.Wrap(serverFunc(func(s process) error {
					h, ctx = handle(s), s.Context()
					h.OnSettle(func(o abort.Outcome) { outcomes = append(outcomes, o) })
					s.Recv()
					time.AfterFunc(500*time.Millisecond, func() {
						if h.Abort(abort.Preempted) {
							t.Error("an abort won after the server's own end")
						}
					})
					return c.end(s)
				}))
				st := extproctest.NewStream(context.Background(), 10)
				go st.Push(requestHeaders(duplex))
				var err error
				p := func() (p any) {
					defer func() { p = recover() }()
					err = st.Serve(srv)
					return nil
				}()
				time.Sleep(time.Second)
				if err != c.err || p != c.panic || len(st.Replies()) != c.sends {
					t.Errorf("Process: %v, panic %v, %d messages sent", err, p, len(st.Replies()))
				}
				if d := cmp.Diff([]abort.Outcome{abort.Closed}, outcomes); d != "" {
					t.Errorf("outcomes (-want +got):\n%s", d)
				}
				if ctx.Err() == nil {
					t.Error("the stream's context is alive")
				}
				<-h.Done()
			})
		})
	}
}

// TestCompletion: the end of the response settles the request when it is received,
// however it comes and also twice; from then on no abort wins, and what the server
// sends goes out.
func TestCompletion(t *testing.T) {
	for _, c := range []struct {
		name string
		end  []*request
	}{
		{"headers", []*request{endStream(responseHeaders())}},
		{"body", []*request{responseHeaders(), responseBody("x", true)}},
		{"empty body", []*request{responseHeaders(), responseBody("x", false), responseBody("", true)}},
		{"trailers", []*request{responseHeaders(), responseBody("x", false), responseTrailers()}},
		{"twice", []*request{responseHeaders(), responseBody("x", true), responseBody("", true)}},
		{"body, then trailers", []*request{responseHeaders(), responseBody("x", true), responseTrailers()}},
		{"without a request", []*request{endStream(responseHeaders())}},
	} {
		for name, recv := range recvs {
			t.Run(c.name+"/"+name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var ev evictor.Evictor
					msgs := c.end
					if c.name != "without a request" {
						msgs = append([]*request{requestHeaders(streamed), requestHeaders(streamed)}, msgs...) // a retry replays the request
					}
					var events []extproc.Event
					st, wait := start(extproc.Handler(func(s *extproc.Stream) error {
						for range msgs {
							if err := recv(s); err != nil {
								t.Error(err)
							}
							ev.TrackRequests(s.Context(), abort.Request{})
						}
						if o := handle(s).Outcome(); o != abort.Completed {
							t.Errorf("outcome %v", o)
						}
						if n := ev.Len(); n != 0 {
							t.Errorf("%d tracked", n)
						}
						if handle(s).Abort(abort.Preempted) {
							t.Error("aborted after the end")
						}
						return s.Send(reply(responseBody("", true)))
					}, extproc.WithObserver(func(e extproc.Event) { events = append(events, e) })), 10)
					for _, m := range msgs {
						st.Push(m)
					}
					if err := wait(); err != nil || len(st.Replies()) != 1 {
						t.Errorf("Process: %v, %d replies", err, len(st.Replies()))
					}
					if len(events) != 1 || events[0].Outcome != abort.Completed || events[0].Answer != extproc.AnswerNone {
						t.Errorf("events: %+v", events)
					}
				})
			})
		}
	}
}

func endStream(r *request) *request {
	r.GetResponseHeaders().EndOfStream = true
	return r
}

// TestConcurrentUse: a server that receives and sends from many goroutines, all at
// once and some after Process has returned. grpc's own stream would corrupt or crash.
func TestConcurrentUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var wg sync.WaitGroup
		release := make(chan struct{})
		var events atomic.Int32
		st, wait := start(extproc.Wrap(serverFunc(func(s process) error {
			for range 5 {
				wg.Go(func() {
					for {
						if _, err := s.Recv(); err != nil {
							<-release // Process has returned
							if _, err := s.Recv(); status.Code(err) != codes.Canceled {
								t.Errorf("Recv after the end: %v", err)
							}
							if err := s.Send(reply(nil)); status.Code(err) != codes.Canceled {
								t.Errorf("Send after the end: %v", err)
							}
							return
						}
						wg.Go(func() { s.Send(reply(responseBody("", false))) })
					}
				})
			}
			time.Sleep(time.Second)
			return nil
		}), extproc.WithObserver(func(extproc.Event) { events.Add(1) })), 0)
		for range 100 {
			go func() { <-st.Replies() }()
			st.Push(responseBody("data: x\n\n", false))
		}
		if err := wait(); err != nil {
			t.Error(err)
		}
		close(release)
		wg.Wait()
		if n := events.Load(); n != 1 {
			t.Errorf("%d events", n)
		}
	})
}

// TestWaitingForATurnIsIdle: Sends that wait for one that is stuck leave a bubble
// idle, so that its fake clock moves.
func TestWaitingForATurnIsIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st, wait := start(extproc.Wrap(serverFunc(func(s process) error {
			for range 3 {
				go s.Send(reply(nil))
			}
			go s.Recv()
			go s.Recv()
			time.Sleep(time.Hour) // for ever, if a waiter is not idle
			return nil
		})), 0)
		wait()
		_ = st
	})
}

// TestAbortWakesWaiters: who waits for a turn behind somebody that the proxy keeps
// waiting is let go by an abort, at once.
func TestAbortWakesWaiters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var woken sync.WaitGroup
		handles := make(chan *abort.Handle, 1)
		st, wait := start(extproc.Handler(func(s *extproc.Stream) error {
			go s.Recv() // nothing comes
			go s.Send(reply(nil))
			time.Sleep(time.Second)
			woken.Go(func() {
				if _, err := s.RecvOrAbort(); err == nil {
					t.Error("RecvOrAbort returned a message")
				}
			})
			woken.Go(func() {
				if err := s.Send(reply(nil)); err != nil {
					t.Errorf("Send: %v", err)
				}
			})
			handles <- handle(s)
			time.Sleep(time.Minute)
			return nil
		}), 0)
		h := <-handles
		time.Sleep(time.Second)
		began := time.Now()
		h.Abort(abort.Preempted)
		woken.Wait()
		if d := time.Since(began); d != 0 {
			t.Errorf("woken after %v", d)
		}
		st.HangUp()
		wait()
	})
}

// TestRecvMsgIntoOwnValue: servers may receive into values of their own, also beside
// a reader.
func TestRecvMsgIntoOwnValue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		want := []*request{requestHeaders(streamed, ":path", "/x"), responseHeaders(), responseBody("x", false)}
		var got []*request
		st, wait := start(extproc.Handler(func(s *extproc.Stream) error {
			var r request
			if err := s.RecvMsg(&r); err != nil {
				t.Error(err)
			}
			got = append(got, &r)
			r2, _ := s.RecvOrAbort()
			got = append(got, r2)
			r3 := responseBody("leftovers", true)
			if err := s.RecvMsg(r3); err != nil {
				t.Error(err)
			}
			got = append(got, r3)
			return nil
		}), 1)
		for _, r := range want {
			st.Push(r)
		}
		wait()
		if d := cmp.Diff(want, got, protocmp.Transform()); d != "" {
			t.Errorf("(-want +got):\n%s", d)
		}
	})
}

// TestBadMessages: whatever the proxy sends, in any order, passes to the server and
// does no harm.
func TestBadMessages(t *testing.T) {
	kinds := []*request{
		{},
		{Request: &extprocpb.ProcessingRequest_RequestHeaders{}},
		{Request: &extprocpb.ProcessingRequest_RequestBody{}},
		{Request: &extprocpb.ProcessingRequest_RequestTrailers{}},
		{Request: &extprocpb.ProcessingRequest_ResponseHeaders{}},
		{Request: &extprocpb.ProcessingRequest_ResponseBody{}},
		{Request: &extprocpb.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocpb.HttpHeaders{Headers: headers("x-request-id", "", "x-request-id", "b", "", "")}}},
		{ProtocolConfig: &extprocpb.ProtocolConfiguration{ResponseBodyMode: 99}},
		{ProtocolConfig: &extprocpb.ProtocolConfiguration{}, ObservabilityMode: true},
		responseHeaders("content-type", "\xff\xfe"),
		responseBody("x", false),
	}
	replies := []*response{
		{},
		{Response: &extprocpb.ProcessingResponse_RequestHeaders{}},
		{Response: &extprocpb.ProcessingResponse_ResponseHeaders{}},
		{Response: &extprocpb.ProcessingResponse_ResponseBody{}},
		{Response: &extprocpb.ProcessingResponse_ResponseTrailers{}},
		{Response: &extprocpb.ProcessingResponse_ImmediateResponse{}},
		{Response: &extprocpb.ProcessingResponse_ResponseBody{ResponseBody: &extprocpb.BodyResponse{Response: &extprocpb.CommonResponse{BodyMutation: &extprocpb.BodyMutation{}}}}},
	}
	interleave(t, func(t *testing.T, d dice) {
		var reg abort.Registry
		var ev evictor.Evictor
		msgs := make([]*request, d.IntN(8))
		for i := range msgs {
			msgs[i] = pick(d, kinds...)
		}
		var h *abort.Handle
		at := d.IntN(len(msgs) + 1)
		st, wait := start(extproc.Handler(func(s *extproc.Stream) error {
			h = handle(s)
			for i := 0; ; i++ {
				if i == at {
					h.Abort(abort.Reason("\x00é" + string(make([]byte, 99))))
				}
				r, err := s.Recv()
				if err != nil {
					return nil
				}
				if r == nil {
					t.Error("nil message")
				}
				s.Send(pick(d, replies...))
			}
		}, extproc.WithRegistry(&reg), extproc.WithTracker(&ev, func(context.Context, *request) (abort.Request, bool) { return abort.Request{}, true })), 100)
		go func() {
			for _, m := range msgs {
				st.Push(m)
			}
			time.Sleep(time.Second)
			st.HangUp()
		}()
		if err := wait(); err != nil {
			t.Error(err)
		}
		time.Sleep(time.Minute) // the proxy's goroutine
		if h.Outcome() == abort.Pending || reg.Len()+ev.Len() != 0 {
			t.Errorf("outcome %v, %d entries", h.Outcome(), reg.Len()+ev.Len())
		}
	})
}

// TestNoGoroutinePerStream counts goroutines with and without Wrap, over streams
// that wait in Recv.
func TestNoGoroutinePerStream(t *testing.T) {
	count := func(srv extprocpb.ExternalProcessorServer) (n int) {
		const streams = 100
		var all []*extproctest.Stream
		var waits []func() error
		before := goroutines()
		for range streams {
			st, wait := start(srv, 1)
			all, waits = append(all, st), append(waits, wait)
			st.Push(requestHeaders(streamed))
			<-st.Replies()
		}
		n = goroutines() - before
		for i := range all {
			all[i].HangUp()
			waits[i]()
		}
		return n
	}
	bare, wrapped := count(echo(streamed)), count(extproc.Wrap(echo(streamed)))
	if bare != wrapped {
		t.Errorf("%d goroutines, %d with Wrap", bare, wrapped)
	}
}

// TestStuckReaders ends many streams with messages under way and sees that no reader
// stays behind.
func TestStuckReaders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // a goroutine that stays fails the bubble
		for i := range 10_000 {
			var h *abort.Handle
			st, wait := start(extproc.Handler(func(s *extproc.Stream) error {
				h = handle(s)
				s.RecvOrAbort()
				time.Sleep(time.Millisecond) // another message is with the reader
				if i%2 == 0 {
					h.Abort(abort.Preempted)
				}
				return nil
			}), 1)
			go envoy(st)
			go func() {
				for st.Push(responseBody("x", false)) {
					time.Sleep(100 * time.Microsecond)
				}
			}()
			wait()
			time.Sleep(time.Millisecond)
		}
	})
}

// TestInterceptor puts StreamInterceptor where grpc would.
func TestInterceptor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		intercept := extproc.StreamInterceptor()
		method := extprocpb.ExternalProcessor_Process_FullMethodName
		handles := make(chan *abort.Handle, 1)
		// What protoc's code does between grpc and the server.
		handler := func(srv any, ss grpc.ServerStream) error {
			return srv.(extprocpb.ExternalProcessorServer).Process(&grpc.GenericServerStream[request, response]{ServerStream: ss})
		}
		next := serverFunc(func(s process) error { handles <- handle(s); return echo(streamed)(s) })
		srv := serverFunc(func(s process) error {
			return intercept(next, s, &grpc.StreamServerInfo{FullMethod: method}, handler)
		})
		st, wait := start(srv, 10)
		h := <-handles
		st.Push(requestHeaders(streamed))
		synctest.Wait()
		if p := h.Progress().Phase; p != abort.Waiting {
			t.Errorf("phase %v", p)
		}
		st.Push(responseHeaders())
		synctest.Wait()
		if p := h.Progress().Phase; p != abort.Streaming {
			t.Errorf("phase %v", p)
		}
		h.Abort(abort.Preempted)
		if n := answers(envoy(st)); n != 1 {
			t.Errorf("%d answers", n)
		}
		if err := wait(); err != nil {
			t.Error(err)
		}

		method = "/other.Service/Method"
		st, wait = start(srv, 10)
		if h := <-handles; h != nil {
			t.Error("another method's stream has a handle")
		}
		st.HangUp()
		wait()
	})
}

// TestTwice wraps a wrapped server: an abort of either ends the request once.
func TestTwice(t *testing.T) {
	for _, which := range []string{"inner", "outer"} {
		t.Run(which, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				handles := map[string]*abort.Handle{}
				inner := extproc.Wrap(serverFunc(func(s process) error {
					handles["inner"] = handle(s)
					return echo(streamed)(s)
				}))
				st, wait := start(extproc.Wrap(serverFunc(func(s process) error {
					handles["outer"] = handle(s)
					return inner.Process(s)
				})), 10)
				st.Push(requestHeaders(streamed))
				synctest.Wait()
				handles[which].Abort(abort.Preempted)
				if n := answers(envoy(st)); n != 1 {
					t.Errorf("%d answers", n)
				}
				if err := wait(); err != nil {
					t.Error(err)
				}
				for name, h := range handles {
					want := abort.Closed
					if name == which {
						want = abort.Aborted
					}
					if o := h.Outcome(); o != want {
						t.Errorf("%s: outcome %v, want %v", name, o, want)
					}
				}
			})
		})
	}
}

// TestHooksMayDoAnything: invariant 7. Hooks and the observer call back into the
// stream, its handle and the evictor, sleep, and panic.
func TestHooksMayDoAnything(t *testing.T) {
	for _, end := range []string{"abort", "completion", "own answer", "client"} {
		t.Run(end, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var ev evictor.Evictor
				var reg abort.Registry
				called := 0
				var st *extproctest.Stream
				use := func(s *extproc.Stream, h *abort.Handle) {
					called++
					s.Send(reply(nil))
					h.Abort(abort.Canceled)
					h.Describe(h.Requests()...)
					h.OnSettle(func(abort.Outcome) { called++ })
					ev.TrackRequests(s.Context(), abort.Request{Priority: -1})
					ev.Evict(context.Background(), evictor.Demand{N: 9, Tokens: 9})
					reg.Add("x", h)
					reg.Abort("x", abort.Canceled)
					for range ev.All() {
						called++
					}
					_, _, _ = h.Progress(), h.Err(), h.Outcome()
					time.Sleep(time.Minute)
				}
				var stream *extproc.Stream
				observed := 0
				srv := extproc.Handler(func(s *extproc.Stream) error {
					stream = s
					handle(s).OnSettle(func(abort.Outcome) { use(s, handle(s)) })
					return echo(streamed)(s)
				}, extproc.WithRegistry(&reg), extproc.WithObserver(func(e extproc.Event) {
					observed++
					use(stream, e.Handle)
					panic("observer")
				}))
				st, wait := start(srv, 10)
				st.Push(requestHeaders(streamed, "x-request-id", "x"))
				synctest.Wait()
				switch end {
				case "abort":
					go reg.Abort("x", abort.Canceled)
					go envoy(st)
				case "completion":
					st.Push(responseBody("", true))
					st.HangUp()
				case "own answer":
					go stream.Send(immediate("own"))
					time.Sleep(time.Second)
					st.HangUp()
				case "client":
					st.HangUp()
				}
				wait()
				time.Sleep(time.Hour)
				if called < 2 || observed != 1 || ev.Len()+reg.Len() != 0 {
					t.Errorf("called %d times, observer %d times, %d entries left", called, observed, ev.Len()+reg.Len())
				}
			})
		})
	}
}

// TestMisuse: wrong configuration fails when it is made and names the option.
func TestMisuse(t *testing.T) {
	for want, f := range map[string]func(){
		"extproc: Wrap: nil server":           func() { extproc.Wrap(nil) },
		"extproc: Handler: nil function":      func() { extproc.Handler(nil) },
		"extproc: WithTracker: nil Tracker":   func() { extproc.WithTracker(nil, nil) },
		"extproc: WithTracker: nil function":  func() { extproc.WithTracker(&evictor.Evictor{}, nil) },
		"extproc: WithRegistry: nil Registry": func() { extproc.WithRegistry(nil) },
		"extproc: WithResponse: nil function": func() { extproc.WithResponse(nil) },
		"extproc: WithObserver: nil function": func() { extproc.WithObserver(nil) },
		"extproc: nil Option":                 func() { extproc.StreamInterceptor(nil) },
	} {
		got := func() (p any) {
			defer func() { p = recover() }()
			f()
			return nil
		}()
		if got != want {
			t.Errorf("panic %v, want %s", got, want)
		}
	}
}

func goroutines() int {
	n := runtime.NumGoroutine()
	for range 100 { // those that are on their way out
		time.Sleep(time.Millisecond)
		if m := runtime.NumGoroutine(); m == n {
			return n
		} else {
			n = m
		}
	}
	return n
}

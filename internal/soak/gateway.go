package main

import (
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"sync"
	"time"

	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/flowcontrol"
	"github.com/extevict/extevict/internal/engine"
	"github.com/extevict/extevict/internal/envoy"
)

const (
	engines    = 3
	blockSize  = 16
	blocks     = 120
	slots      = 6
	evictBelow = 2 // the Pool spares the highest of the crowd's priorities
)

// A mode is the ext_proc filter's processing mode. Each of them keeps streams evictable.
type mode struct{ envoy.ProcessingMode }

var modes = []mode{
	{envoy.ProcessingMode{ResponseBody: envoy.FullDuplexStreamed, ResponseTrailers: envoy.Send, RequestBody: envoy.FullDuplexStreamed, RequestTrailers: envoy.Send}},
	{envoy.ProcessingMode{ResponseBody: envoy.Streamed}},
	{envoy.ProcessingMode{ResponseTrailers: envoy.Send}},
}

// seesEnd reports whether the picker sees the end of a response without trailers.
func (m mode) seesEnd() bool { return m.ResponseBody != "" }

func (m mode) String() string {
	if m.ResponseBody == "" {
		return "NONE"
	}
	return string(m.ResponseBody)
}

// A gateway is a picker, in a grpc server, behind an Envoy and in front of engines. All of
// these can be restarted, by one goroutine at a time.
type gateway struct {
	bin      string
	account  *account
	evictor  *evictor.Evictor
	registry abort.Registry
	pool     *flowcontrol.Pool
	engines  []*engineServer
	server   *grpc.Server
	address  string
	running  chan struct{} // closed when server no longer serves

	mu    sync.Mutex // guards what follows
	envoy *envoy.Envoy
	mode  int // of modes
}

// startGateway starts everything. The evictor calls aborter for each victim.
func startGateway(ctx context.Context, bin string, a *account, aborter abort.Aborter) (*gateway, error) {
	g := &gateway{bin: bin, account: a, evictor: evictor.New(evictor.WithAborter(aborter))}
	g.pool = flowcontrol.NewPool(g.evictor, flowcontrol.WithEvictionBelow(evictBelow), flowcontrol.WithSteps(blockSize, 512),
		flowcontrol.WithMaxWaiting(20), flowcontrol.WithObserver(a.decided))
	for range engines {
		e := &engineServer{}
		g.engines = append(g.engines, e)
		if err := e.start("127.0.0.1:0"); err != nil {
			return nil, errors.Join(err, g.close())
		}
		g.admitTo(e)
	}
	if err := g.serve("127.0.0.1:0"); err != nil {
		return nil, errors.Join(err, g.close())
	}
	if err := g.startEnvoy(ctx, 0); err != nil {
		return nil, errors.Join(err, g.close())
	}
	return g, nil
}

func (g *gateway) close() error {
	var err error
	if g.envoy != nil {
		err = g.envoy.Close()
	}
	if g.server != nil {
		g.server.Stop()
		<-g.running
	}
	for _, e := range g.engines {
		e.stop()
	}
	return err
}

// target returns where clients call, and how that works now.
func (g *gateway) target() (url string, m mode) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.envoy.URL(), modes[g.mode]
}

func (g *gateway) startEnvoy(ctx context.Context, mode int) error {
	e, err := envoy.Start(ctx, g.bin, envoy.Config{
		ExtProc:      []envoy.ExtProc{{Address: g.address, Mode: modes[mode].ProcessingMode, MessageTimeout: 2 * patience}},
		Upstream:     envoy.Upstream{ByHeader: true},
		DelayedClose: new(100 * time.Millisecond),
	})
	if err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.envoy, g.mode = e, mode
	return nil
}

// restartEnvoy kills Envoy and starts another one, with the next mode.
func (g *gateway) restartEnvoy(ctx context.Context) error {
	if err := g.envoy.Close(); err != nil {
		return err
	}
	return g.startEnvoy(ctx, (g.mode+1)%len(modes))
}

// serve starts the grpc server. Panics of the picker are recovered as everybody does it.
func (g *gateway) serve(address string) error {
	l, err := listen(address)
	if err != nil {
		return err
	}
	s := grpc.NewServer(grpc.WaitForHandlers(true), grpc.StreamInterceptor(func(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) (err error) {
		defer func() {
			if p := recover(); p != nil {
				if p != errPanic {
					g.account.violate("the ext_proc server panicked: %v", p)
				}
				err = status.Error(codes.Internal, "the picker panicked")
			}
		}()
		return next(srv, ss)
	}))
	extprocpb.RegisterExternalProcessorServer(s, extproc.Wrap(&picker{gateway: g},
		extproc.WithRegistry(&g.registry), extproc.WithObserver(g.account.observe)))
	running := make(chan struct{})
	go func() { // ends with s.Stop
		defer close(running)
		s.Serve(l)
	}()
	g.server, g.address, g.running = s, l.Addr().String(), running
	return nil
}

// restartServer stops the grpc server, gracefully for a while or at once, and starts another
// one at its address.
func (g *gateway) restartServer(graceful bool) error {
	if graceful {
		t := time.AfterFunc(time.Second, g.server.Stop)
		g.server.GracefulStop()
		t.Stop()
	}
	g.server.Stop()
	<-g.running
	return g.serve(g.address)
}

// listen listens at an address that may have been in use until now.
func listen(address string) (net.Listener, error) {
	for i := 0; ; i++ {
		l, err := net.Listen("tcp", address)
		if err == nil || i == 50 {
			return l, err
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// An engineServer is an engine that listens, and can be stopped and started again.
type engineServer struct {
	address string // always the same
	server  *http.Server

	mu     sync.Mutex // guards engine
	engine *engine.Server
}

func (e *engineServer) start(address string) error {
	l, err := listen(address)
	if err != nil {
		return err
	}
	s := engine.NewServer(engine.Config{BlockSize: blockSize, Blocks: blocks, MaxSeqs: slots, MaxBatchedTokens: 512,
		Cost: engine.Cost{Step: 3 * time.Millisecond, Prefill: 20 * time.Microsecond}})
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.address == "" { // else it is the same
		e.address = l.Addr().String()
	}
	e.engine, e.server = s, &http.Server{Handler: s, ErrorLog: log.New(io.Discard, "", 0)}
	go e.server.Serve(l) // ends with e.server.Close
	return nil
}

// stop is a crash.
func (e *engineServer) stop() {
	if e.server != nil {
		e.server.Close()
		e.engine.Close()
	}
}

func (e *engineServer) stats() engine.Stats {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.engine.Stats()
}

// hangUp closes the connections that are idle.
func (e *engineServer) hangUp() {
	e.server.SetKeepAlivesEnabled(false)
	e.server.SetKeepAlivesEnabled(true)
}

// admitTo has the Pool use an engine.
func (g *gateway) admitTo(e *engineServer) {
	g.pool.SetEndpoint(flowcontrol.Endpoint{Name: e.address, Capacity: blocks * blockSize, Slots: slots})
}

// sample tells the Pool what the engines hold, until ctx is done.
func (g *gateway) sample(ctx context.Context) {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for ctx.Err() == nil {
		for _, e := range g.engines {
			g.pool.Observe(e.address, flowcontrol.Sample{Used: int64(e.stats().BlocksUsed) * blockSize, Capacity: blocks * blockSize, At: time.Now()})
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
}
